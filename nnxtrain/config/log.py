"""What a run says while it goes."""

from dataclasses import dataclass

from nnxtrain.config.key import key


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Console and TensorBoard; `metrics.jsonl` has a row for every step whatever stands here."""

    every_steps: int = key(10, "steps between two lines on the console and two points in TensorBoard", span="[1, inf)")
    progress: str = key("auto", "live bar or plain lines; auto = bar on a terminal", choices=("auto", "bar", "lines"))
    tensorboard: bool = key(True, "write TensorBoard events")
