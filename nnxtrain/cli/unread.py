"""Keys on the command line of `evaluate` and `generate` that the command does not read: said, never refused."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nnxtrain.config.checks import LEAVES, value_at
from nnxtrain.config.echo import echo
from nnxtrain.config.schema import Config

PROCESS = ("debug.traceback", "debug.platform", "debug.compilation_cache")
# command → keys, and sections with their dot, that it reads; keys of the optimizer too where weights are averaged
READ = {
    "evaluate": (
        *("seed", "model.", "batch.global_size", "batch.accum_steps", "batch.sequence", "data.", "loss.chunks"),
        *("mesh.", "eval.global_size", "eval.max_batches", "checkpoint.keep_best", *PROCESS),
    ),
    "generate": ("generate.", "model.", "batch.sequence", "data.", *PROCESS),
}
TRAINING = {"model.dropout", "data.epochs", "data.drop_remainder", "data.prefetch"}  # of these sections, not read
TOKENIZER = {"data.source", "data.tokenizer"}  # what `generate` reads of the data, where both are of this package


def unread_words(words: Sequence[str], config: Config, before: Mapping[str, Any], *, command: str) -> Iterator[str]:
    """Yields a line for each key of the command line that has no effect on a command.

    Args:
        words: `key=val` of the command line.
        config: with these words.
        before: the keys of the run without them, by dotted path.
        command: `evaluate` or `generate`.
    """
    averaged = before.get("optimizer.ema") is not None or before.get("optimizer.name") == "schedule_free_adamw"
    reads = [*READ[command], *(["optimizer."] if averaged or config.optimizer.averages else [])]
    skipped = set(TRAINING)
    if command == "generate" and all(value_at(config, path) in _choices(path) for path in TOKENIZER):
        skipped |= {path for path in LEAVES if path.startswith("data.")} - TOKENIZER
    for path, word in {word.partition("=")[0]: word for word in words}.items():
        is_read = any(path.startswith(name) if name.endswith(".") else path == name for name in reads)
        if path in LEAVES and (path in skipped or not is_read):
            yield f"{echo(word)} has no effect on python -m nnxtrain.{command}"


def _choices(path: str) -> tuple[str, ...]:
    choices: tuple[str, ...] = LEAVES[path].declared.metadata["choices"]
    return choices
