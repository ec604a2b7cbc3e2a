"""What the backward pass keeps of a layer; all else it computes again."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax import checkpoint_policies as cp
from jax.ad_checkpoint import Offloadable, checkpoint_name

from nnxtrain import tags
from nnxtrain.config.lookup import lookup
from nnxtrain.config.remat import ACTIONS, RematConfig
from nnxtrain.models.stack import Wrap, no_wrap
from nnxtrain.types import RematPolicy

HOST = "pinned_host"  # what jax calls the memory of the host that a device copies to by itself
QKV = (tags.QUERIES, tags.KEYS, tags.VALUES)
PROJECTIONS = (*QKV, tags.OUT_PROJECTION, tags.MLP_GATE, tags.MLP_UP)  # nothing in the backward pass asks for mlp_down


def by_tag(*, save: Iterable[str] = (), offload: Iterable[str] = ()) -> RematPolicy:
    """Returns the policy that keeps tagged activations, on the device or in pinned host memory, and nothing else."""
    return cp.save_and_offload_only_these_names(
        names_which_can_be_saved=list(save),
        names_which_can_be_offloaded=list(offload),
        offload_src="device",
        offload_dst=HOST,
    )


# The input of a layer is kept by each of them. "none" is not here: no remat is no `jax.checkpoint`. "custom" is not
# here: its tags are in the configuration.
REMAT_POLICIES: dict[str, RematPolicy] = {
    "full": cp.nothing_saveable,
    "dots": cp.dots_saveable,
    "dots_no_batch": cp.dots_with_no_batch_dims_saveable,
    "attention": by_tag(save=[tags.ATTENTION_OUT]),
    "mlp": by_tag(save=[tags.MLP_GATE, tags.MLP_UP]),
    "qkv": by_tag(save=QKV),
    "attention_layer": by_tag(save=[*QKV, tags.ATTENTION_OUT, tags.OUT_PROJECTION]),
    "projections": by_tag(save=PROJECTIONS),
    "projections_attention": by_tag(save=[*PROJECTIONS, tags.ATTENTION_OUT]),
    "qkv_offload": by_tag(offload=QKV),
    "projections_offload": by_tag(offload=PROJECTIONS),
}


def policy_of(config: RematConfig, policies: Mapping[str, RematPolicy]) -> RematPolicy | None:
    """Returns the policy that `config` names, out of `policies` or made of its tags; None for no remat."""
    if config.policy == "none":
        return None
    if config.policy != "custom":
        return lookup(policies, config.policy, key="remat.policy")
    wished = {action: [tag for tag, wish in config.actions.items() if wish == action] for action in ACTIONS}
    return by_tag(save=wished["save"], offload=wished["offload"])


def make_wrap(policy: RematPolicy | None) -> Wrap:
    """Returns what a stack puts around each layer."""
    if policy is None:
        return no_wrap

    def wrap(function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        # in a loop the compiler cannot merge the second computation with the first; elsewhere it must be kept from it
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_loop)

    return wrap


def verdict(policy: RematPolicy, tag: str) -> Any:
    """Returns what `policy` says of an activation with a tag: kept or not, or where it is moved to."""
    (named,) = jax.make_jaxpr(lambda x: checkpoint_name(x, tag))(0.0).jaxpr.eqns
    return policy(named.primitive, *(operand.aval for operand in named.invars), **named.params)


def offloaded(policy: RematPolicy | None) -> list[str]:
    """Returns the tags that `policy` moves to host memory."""
    return [tag for tag in tags.TAGS if policy and isinstance(verdict(policy, tag), Offloadable)]


def can_offload(device: jax.Device) -> bool:
    """Tells whether there is host memory apart from the device's own; the compiler of the CPU drops such moves."""
    return device.platform != "cpu" and HOST in (memory.kind for memory in device.addressable_memories())
