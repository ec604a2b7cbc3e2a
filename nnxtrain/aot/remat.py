"""Bytes that each remat policy saves for the backward pass, from the jaxpr of one microbatch; nothing is compiled."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from flax import nnx

from nnxtrain.build.program import Program, make_program, on_one_device
from nnxtrain.build.registry import Registry
from nnxtrain.build.step import loss_sum_of
from nnxtrain.config.remat import RematConfig
from nnxtrain.config.schema import Config
from nnxtrain.types import PRNG

Loss = Callable[[nnx.State], jax.Array]  # of parameters


class Kept(NamedTuple):
    """Bytes that one microbatch saves for its backward pass, over all devices, without weights and batch."""

    device: int
    host: int


def kept_bytes(config: Config, registry: Registry, *, devices: list[jax.Device] | None = None) -> Kept:
    """Returns the bytes that the policy of `config` saves, traced for the first of `devices` (None: this process's)."""
    (jaxpr,) = trace_loss(make_program(on_one_device(config), devices=devices, registry=registry), residuals)
    return residual_bytes(jaxpr)


def residuals(loss: Loss, params: nnx.State) -> list[jax.Array]:
    """Returns the residuals that `loss` saves for its backward pass."""
    return jax.tree.leaves(jax.vjp(loss, params)[1])


def residual_bytes(jaxpr: Any) -> Kept:
    """Returns the bytes of the outputs of a jaxpr of `residuals` that are not also its arguments."""
    found = {var for var in jaxpr.outvars if not hasattr(var, "val")}.difference(jaxpr.invars, jaxpr.constvars)
    sizes = [(var.aval.memory_space == jax.memory.Space.Host, var.aval.size * var.aval.dtype.itemsize) for var in found]
    host = sum(size for on_host, size in sizes if on_host)
    return Kept(sum(size for _, size in sizes) - host, host)


def trace_loss(program: Program, *functions: Callable[[Loss, nnx.State], Any]) -> Iterator[Any]:
    """Yields the jaxpr of each `function(loss, params)`, where `loss(params)` is that of one microbatch."""
    config = program.config
    loss_sum = loss_sum_of(config, program.layout, z_loss=config.loss.z_loss, dropout=config.model.dropout)
    graph, params, others = nnx.split(program.abstract_state().model, nnx.Param, ...)
    spec = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in program.batch_spec().items()}

    for function in functions:

        def traced(params: Any, others: Any, microbatch: Any) -> Any:
            key = jax.random.key(config.seed, impl=PRNG)
            return function(lambda params: loss_sum(nnx.merge(graph, params, others), microbatch, key)[0], params)

        yield jax.make_jaxpr(traced)(params, others, spec).jaxpr


def bytes_by_policy(program: Program) -> dict[str, int]:
    """Returns the bytes that each policy saves on the device; policies that offload are left out, except the program's.

    They are for a model of one period of layers; the order of policies is the same for any number of layers.
    """
    config, devices = program.config, list(program.mesh.devices.flat)
    small = replace(config, model=replace(config.model, layers=config.model.period))
    others = {name: replace(small, remat=RematConfig(policy=name)) for name in program.registry.remat_policies}
    kept = {
        name: kept_bytes(one, program.registry, devices=devices)
        for name, one in (others | {config.remat.policy: small}).items()
    }
    return {name: one.device for name, one in kept.items() if name == config.remat.policy or not one.host}


def lighter_than(policy: str, kept: Mapping[str, int]) -> str | None:
    """Returns the policy that saves the most of those that save less than `policy`, or None if there is none."""
    lighter = [name for name in kept if kept[name] < kept[policy]]
    return max(lighter, key=lambda name: kept[name], default=None)
