"""Work of a program, counted from its jaxpr."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def _devices(params: Mapping[str, Any]) -> int:
    """Returns how many devices run the body of a `shard_map`, each on its part."""
    return math.prod(params["mesh"].shape[name] for name in params["newly_manual_axes"])


# how often an operation runs the jaxprs inside it
_TIMES: dict[str, Callable[[Mapping[str, Any]], int]] = {"scan": lambda params: params["length"], "shard_map": _devices}


def product_flops(jaxpr: Any) -> int:
    """Returns the FLOPs of all matrix products of a jaxpr, on all devices, those of a scan once for each turn."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            depth = 1
            for axis in contracted:
                depth *= left[axis]
            total += 2 * depth * equation.outvars[0].aval.size
        times = _TIMES.get(equation.primitive.name, lambda params: 1)(equation.params)
        total += times * sum(product_flops(inner) for inner in _jaxprs_in(equation.params))
    return total


def _jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else [value]:
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner
