"""Console output and TensorBoard."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Console output and TensorBoard; `metrics.jsonl` always has a row for every step."""

    every_steps: int = key(10, "steps between console lines and between TensorBoard points", span="[1, inf)")
    progress: str = key(
        "auto", "progress bar or plain lines; auto = bar on a terminal", choices=("auto", "bar", "lines")
    )
    tensorboard: bool = key(True, "write TensorBoard events")
