"""A value other than the default for every key, and the words under which it is read, or not."""

import types
import typing

from nnxtrain.config.checks import LEAVES
from nnxtrain.config.reads import Clause, Condition, show

# of the rest any value will do
OTHER: dict[str, str | None] = {
    "run_name": "other", "model.name": None, "model.preset": "llama2-7b", "model.embed": "96", "model.heads": "2",
    "model.kv_heads": "2",
    "model.head_dim": "32", "model.vocab": "400", "model.rope_high": "8", "model.pattern": "global,global",
    "model.rope_low": "2", "batch.global_size": "24", "batch.accum_steps": "2", "batch.sequence": "64",
    "batch.accumulator": "scan", "data.source": "synthetic", "loss.chunks": "4", "mesh.data": "2",
    "checkpoint.resume": "never", "eval.global_size": "8", "mesh.slices": "2", "mesh.rules": "mlp=none",
    "distributed.coordinator": "host:1234", "distributed.process": "1", "optimizer.groups": "embedding/* freeze",
    "remat.policy": "full",
    "remat.tags": "mlp_hidden=save,queries=offload", "profile.processes": "first",
    "profile.python_tracer_level": "1", "profile.advanced": "level=1", "aot.topology": "cpu:8",
    "aot.compiler_options": "xla_flag=1", "aot.sweep": "remat.policy=none,full", "data.tokenizer": None,
}  # fmt: skip
# what a word asks for beside it
COMPANIONS = {
    "data.source=text": ("data.path=x",),
    "remat.policy=custom": ("remat.tags=keys=save",),
    "model.pattern=local": ("model.window=8",),
    "profile.first_wait=false": ("profile.repeat=3",),
    "distributed.process=1": ("distributed.processes=2",),
    "distributed.processes=4": ("distributed.coordinator=host:1",),
}


def kind_of(path: str):
    """Returns the type of a key without its `| None`."""
    kind = LEAVES[path].type
    if isinstance(kind, types.UnionType):
        kind = next(member for member in typing.get_args(kind) if member is not type(None))
    return kind


def other_than_default(path: str) -> str | None:
    """Returns a word for a value that is not the default, or None where there is no such value (yet)."""
    leaf = LEAVES[path]
    rule = leaf.declared.metadata
    if path in OTHER or rule["planned"]:
        return OTHER.get(path)
    if rule["choices"]:
        return next(name for name in rule["choices"] if name != leaf.default)
    if isinstance(leaf.default, bool):
        return str(not leaf.default).lower()
    if rule["span"]:
        low, high = (float(end) for end in rule["span"][1:-1].split(","))
        number = (low + high) / 2 if high < 100 else low + 3
        number += number == leaf.default
        return f"{number:g}" if kind_of(path) is float else str(int(number))
    return "a,b" if isinstance(leaf.default, tuple) else "words"


def with_companions(*words: str) -> list[str]:
    """Returns words and what they ask for, unless it is given."""
    asked = [word for one in words for word in COMPANIONS.get(one, ())]
    names = {word.partition("=")[0] for word in words}
    return [*(word for word in asked if word.partition("=")[0] not in names), *words]


def holding(clause: Clause) -> str:
    """Returns a word under which a clause holds."""
    if clause.holds(LEAVES[clause.path].default):
        return f"{clause.path}={show(LEAVES[clause.path].default)}"
    if clause.is_not or not clause.values:
        return f"{clause.path}={other_than_default(clause.path)}"
    return f"{clause.path}={str(clause.values[0]).replace('True', 'true').replace('False', 'false')}"


def failing(condition: Condition) -> list[str]:
    """Returns words under which the first clause of each alternative does not hold."""
    firsts: dict[str, list[Clause]] = {}
    for way in condition.ways:
        firsts.setdefault(way[0].path, []).append(way[0])
    return [f"{path}={show(failing_value(path, clauses))}" for path, clauses in firsts.items()]


def failing_value(path: str, clauses: list[Clause]):
    """Returns a value of a key under which none of the clauses holds."""
    default, choices = LEAVES[path].default, LEAVES[path].declared.metadata["choices"]
    values = [value for clause in clauses for value in (clause.values if clause.is_not else ())]
    tried = [*values, *choices, default, type(default)()]
    return next(value for value in tried if not any(clause.holds(value) for clause in clauses))
