"""FLOPs of a program, counted from its jaxpr."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# kernels whose FLOPs are not in the jaxpr; a `pallas_call` may have a cost estimate
OPAQUE = ("pallas_call", "ffi_call", "tpu_custom_call")
OPAQUE_PREFIX = "dot_product_attention_"  # of cuDNN


class Products(NamedTuple):
    """FLOPs of matrix products on all devices, and the names of kernels whose FLOPs are unknown."""

    flops: int
    unknown: tuple[str, ...]


def _devices(params: Mapping[str, Any]) -> int:
    """Returns how many devices run the body of a `shard_map`, each on its part."""
    return math.prod(params["mesh"].shape[name] for name in params["newly_manual_axes"])


# how often an operation runs the jaxprs inside it
_TIMES: dict[str, Callable[[Mapping[str, Any]], int]] = {"scan": lambda params: params["length"], "shard_map": _devices}


def products_of(jaxpr: Any) -> Products:
    """Returns the matrix products of a jaxpr on all devices, those of a scan once for each iteration.

    A ragged product counts each row once, with its own group. A Pallas kernel counts its cost estimate; one without an
    estimate, and any other opaque kernel, is unknown.
    """
    flops = 0
    unknown: dict[str, None] = {}  # an ordered set
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in OPAQUE or name.startswith(OPAQUE_PREFIX):
            estimate = equation.params.get("cost_estimate")
            if estimate is None:
                unknown[equation.params.get("name") or name] = None
            else:
                flops += estimate.flops
            continue
        if name == "dot_general":
            flops += _dense(equation, equation.params["dimension_numbers"])
        elif name == "ragged_dot_general":
            flops += _ragged(equation)
        times = _TIMES.get(name, lambda params: 1)(equation.params)
        for inner in map(products_of, _jaxprs_in(equation.params)):
            flops += times * inner.flops
            unknown.update(dict.fromkeys(inner.unknown))
    return Products(flops, tuple(unknown))


def product_flops(jaxpr: Any) -> int:
    """Returns the known FLOPs of all matrix products of a jaxpr, on all devices."""
    return products_of(jaxpr).flops


def _dense(equation: Any, dimension_numbers: Any) -> int:
    (contracted, _), _ = dimension_numbers
    left = equation.invars[0].aval.shape
    return 2 * math.prod(left[axis] for axis in contracted) * equation.outvars[0].aval.size


def _ragged(equation: Any) -> int:
    """Returns the FLOPs of a product in which each row, or each term of the sums, belongs to one group."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    whole = _dense(equation, numbers.dot_dimension_numbers)
    if set(numbers.lhs_ragged_dimensions) & set(contracted):  # an output for each group, of its share of the terms
        return whole // equation.invars[2].aval.shape[-1]
    return whole


def _jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else [value]:
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner
