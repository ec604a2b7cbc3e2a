"""The optimizer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nnxtrain.config.coerce import coerce
from nnxtrain.config.echo import echo
from nnxtrain.config.key import Problem, key
from nnxtrain.config.reads import when
from nnxtrain.config.words import Word

LARGEST = {"decay": 1000.0, "rate_scale": 1000.0}  # of a group
# which optimizers read which keys
BETAS = when("optimizer.name", "adamw", "lion", "muon", "schedule_free_adamw")
SECOND_MOMENT = when("optimizer.name", "adamw", "muon", "schedule_free_adamw")
VELOCITY = when("optimizer.name", "sgd", "muon")
FIRST_MOMENT = when("optimizer.name", "adamw", "lion", "muon") | (
    when("optimizer.name", "sgd") & when("optimizer.momentum")
)
# what null means for optimizers with published values of their own
OWN_B2 = {"lion": 0.99}
OWN_MOMENTUM = {"muon": 0.95}


@dataclass(frozen=True)
class Group:
    """Settings of the parameters whose paths match `pattern`; None keeps the general value."""

    pattern: str
    decay: float | None = None
    rate_scale: float | None = None
    freeze: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optax chain: clipping, optimizer, decoupled weight decay, learning rate, averages."""

    name: str = key(
        "adamw",
        "optimizer",
        choices=("adamw", "adafactor", "lion", "muon", "sgd", "schedule_free_adamw"),
    )
    learning_rate: float = key(3e-4, "peak learning rate", span="[0, 1e38]")
    weight_decay: float = key(
        0.1,
        "decoupled weight decay of matrices and embeddings; norms and biases are not decayed unless a group says so",
        span="[0, 1000]",
    )
    b1: float = key(
        0.9,
        "beta1: decay rate of the first moment; lion, schedule_free_adamw: weight of an interpolation",
        span="[0, 0.9999999]",
        read=BETAS,
    )
    b2: float | None = key(
        None,
        "beta2: decay rate of the second moment, for lion of the first; null = 0.95, lion 0.99",
        span="[0, 0.9999999]",
        read=BETAS,
    )
    eps: float = key(
        1e-8,
        "adamw, muon, schedule_free_adamw: epsilon, added to the root of the second moment",
        span="[1e-37, 1]",
        read=SECOND_MOMENT,
    )
    momentum: float | None = key(
        None, "sgd, muon: momentum; null = 0 for sgd, 0.95 for muon", span="[0, 0.9999999]", read=VELOCITY
    )
    mu_dtype: str = key(
        "float32", "dtype of the first moment or momentum buffer", choices=("float32", "bfloat16"), read=FIRST_MOMENT
    )
    clip_norm: float | None = key(1.0, "gradients are clipped to this global norm; 0 or null = off", span="[0, 1e12]")
    groups: tuple[str, ...] = key(
        (),
        "'PATTERN decay=D rate_scale=R' or 'PATTERN freeze' for parameters whose path matches; the last match applies",
    )
    ema: float | None = key(
        None,
        "decay rate of an exponential moving average of the weights, used to evaluate and generate; null = off",
        span="[0, 0.9999999]",
    )

    @property
    def averages(self) -> bool:
        """Whether the weights to evaluate with are averages, which are part of the optimizer state."""
        return self.ema is not None or self.name == "schedule_free_adamw"

    def derived(self) -> "OptimizerConfig":
        """Returns a copy with the optimizer's published values for keys that are not set."""
        b2 = OWN_B2.get(self.name, 0.95) if self.b2 is None else self.b2
        momentum = OWN_MOMENTUM.get(self.name, 0.0) if self.momentum is None else self.momentum
        return replace(self, b2=b2, momentum=momentum)

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it.

        Published values are not filled in yet.
        """
        return self._groups(), self._schedule_free_b1(), self._schedule_free_ema()

    def _groups(self) -> Iterator[Problem]:
        for text in self.groups:
            try:
                group_of(text)
            except ValueError as error:
                yield "optimizer.groups", str(error)

    def _schedule_free_b1(self) -> Iterator[Problem]:
        if self.name == "schedule_free_adamw" and not self.b1:
            yield "optimizer.b1", "0.0 must be above 0 for optimizer.name=schedule_free_adamw, such as 0.9"

    def _schedule_free_ema(self) -> Iterator[Problem]:
        if self.name == "schedule_free_adamw" and self.ema is not None:
            rule = f"{self.ema} would average weights that optimizer.name=schedule_free_adamw averages already"
            yield "optimizer.ema", f"{rule}; set it to null"


def group_of(text: str) -> Group:
    """Returns the group that an item of `optimizer.groups` describes.

    Raises:
        ValueError: the text is not such an item; says what was expected.
    """
    pattern, *words = text.split() or [""]
    shown = f"'{echo(text)}'"
    found: dict[str, float | bool] = {}
    for word in words:
        name, equals, number = word.partition("=")
        if name in found:
            raise ValueError(f"{shown} sets {name} twice")
        if word == "freeze":
            found[name] = True
        elif name in LARGEST and equals:
            found[name] = _number(shown, word, number, LARGEST[name])
        else:
            raise ValueError(f"{shown}: '{echo(word)}' is not decay=D, rate_scale=R or freeze")
    if not found or ("freeze" in found and len(found) > 1):
        raise ValueError(f"{shown} must be a pattern, followed by decay=D, rate_scale=R or both, or by freeze alone")
    return Group(pattern, **found)  # type: ignore[arg-type]


def _number(shown: str, word: str, number: str, largest: float) -> float:
    value = coerce(Word(word, number, shown), float, ())
    if not 0 <= value <= largest:
        raise ValueError(f"{shown}: '{echo(word)}' must be {'at least 0' if value < 0 else f'at most {largest:g}'}")
    return float(value)
