"""Remat policies: the activations of a layer kept for the backward pass; all others are recomputed."""

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

HOST = "pinned_host"  # jax's name for host memory that a device can copy to by DMA
QKV = (tags.QUERIES, tags.KEYS, tags.VALUES)
PROJECTIONS = (*QKV, tags.OUT_PROJECTION, tags.MLP_GATE, tags.MLP_UP)  # the backward pass never needs mlp_down


def by_tag(*, save: Iterable[str] = (), offload: Iterable[str] = ()) -> RematPolicy:
    """Returns the policy that keeps only these tags, on the device or offloaded to pinned host memory."""
    return cp.save_and_offload_only_these_names(
        names_which_can_be_saved=list(save),
        names_which_can_be_offloaded=list(offload),
        offload_src="device",
        offload_dst=HOST,
    )


# All of them keep the input of a layer. "none" is not an entry, since it means no `jax.checkpoint`; nor is "custom",
# since its tags are in the configuration.
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
    """Returns the policy that `config` names in `policies`, or builds it from tags; None for no remat."""
    if config.policy == "none":
        return None
    if config.policy != "custom":
        return lookup(policies, config.policy, key="remat.policy")
    tags_of = {action: [tag for tag, each in config.actions.items() if each == action] for action in ACTIONS}
    return by_tag(save=tags_of["save"], offload=tags_of["offload"])


def make_wrap(policy: RematPolicy | None) -> Wrap:
    """Returns the wrapper that a stack applies to each layer."""
    if policy is None:
        return no_wrap

    def wrap(function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        # CSE cannot undo the recomputation inside a loop; elsewhere it must be prevented
        return jax.checkpoint(function, policy=policy, prevent_cse=not in_loop)

    return wrap


def decision(policy: RematPolicy, tag: str) -> Any:
    """Returns the decision of `policy` on an activation with this tag: saved, recomputed or offloaded."""
    (named,) = jax.make_jaxpr(lambda x: checkpoint_name(x, tag))(0.0).jaxpr.eqns
    return policy(named.primitive, *(operand.aval for operand in named.invars), **named.params)


def offloaded(policy: RematPolicy | None) -> list[str]:
    """Returns the tags that `policy` offloads to host memory."""
    return [tag for tag in tags.TAGS if policy and isinstance(decision(policy, tag), Offloadable)]


def can_offload(device: jax.Device) -> bool:
    """Returns whether `device` has separate host memory; on CPU the compiler drops such copies."""
    return device.platform != "cpu" and HOST in (memory.kind for memory in device.addressable_memories())
