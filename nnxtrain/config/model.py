"""Architecture of the model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nnxtrain.config.key import Problem, key
from nnxtrain.config.lookup import not_one_of
from nnxtrain.config.presets import PRESETS
from nnxtrain.config.reads import show, when

GLOBAL, LOCAL = KINDS = ("global", "local")  # of layers, by what they attend to
MLP_MULTIPLE = 64  # a derived model.mlp is rounded up to this
MULTIPLE_OF_VOCAB = 128  # rows of the embedding table are rounded up to this

LLAMA3 = when("model.rope_scaling", "llama3")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of the model. Sizes of 0 are derived when the configuration is loaded."""

    name: str = key("decoder", "model architecture", choices=("decoder",))
    preset: str | None = key(
        None, "sizes of a published model; other keys of this section take precedence", choices=tuple(PRESETS)
    )
    layers: int = key(4, "number of layers", span="[1, 10000]")
    embed: int = key(256, "width of the residual stream", span="[1, 1048576]")
    heads: int = key(4, "attention heads (queries)", span="[1, 65536]")
    kv_heads: int = key(0, "heads of keys and values, a divisor of heads; 0 = heads", span="[0, 65536]")
    head_dim: int = key(0, "width of a head, even; 0 = embed / heads", span="[0, 65536]")
    mlp: int = key(
        0, "width of the feed-forward layer; 0 = 8/3 embed, rounded up to a multiple of 64", span="[0, 16777216]"
    )
    vocab: int = key(
        384, "size of the vocabulary; the embedding table is padded to a multiple of 128", span="[2, 16777216]"
    )
    dropout: float = key(0.0, "dropout rate in training", span="[0, 0.9999999]")
    dtype: str = key(
        "auto",
        "dtype of the computation; auto = bfloat16 on TPU and GPU, float32 on CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    param_dtype: str = key("float32", "dtype of the weights", choices=("float32", "bfloat16"))
    tied: bool = key(False, "use the embedding table as the output head")
    scan_layers: bool = key(True, "scan over stacked weights of layers (jax.lax.scan); false unrolls them")
    scan_unroll: int = key(
        1,
        "layers, or repetitions of pattern, per iteration of the scan",
        span="[1, 10000]",
        read=when("model.scan_layers", True),
    )
    pattern: tuple[str, ...] = key(
        (GLOBAL,),
        "kinds of layers, repeated over the stack: global attends to all earlier tokens, local to a window of them",
    )
    window: int | None = key(
        None,
        "window of local layers, tokens, the current one included",
        span="[1, inf)",
        read=when("model.pattern", LOCAL),
    )
    attention: str = key(
        "auto",
        "attention kernel; auto = the first that supports this model and mesh",
        choices=("auto", "blocked", "dot_product"),
    )
    qk_norm: bool = key(False, "RMS norm on queries and keys, before RoPE")
    logit_softcap: float | None = key(
        None, "output logits become cap * tanh(logits / cap); null = off", span="[1e-6, 1000000]"
    )
    norm_eps: float = key(1e-5, "epsilon of RMS norm, added to the mean square", span="[0, 1]")
    rope_theta: float = key(10000.0, "base of the RoPE wavelengths", span="[1, 1e12]")
    rope_scaling: str = key("none", "scaling of the RoPE wavelengths for long sequences", choices=("none", "llama3"))
    rope_factor: float = key(
        8.0, "llama3 scaling: factor by which long wavelengths are stretched", span="[1, 1000000]", read=LLAMA3
    )
    rope_low: float = key(
        1.0,
        "llama3 scaling: wavelengths with fewer rotations than this per original sequence get the full factor",
        span="[0, 1000000]",
        read=LLAMA3,
    )
    rope_high: float = key(
        4.0, "llama3 scaling: wavelengths with more rotations than this are unchanged", span="[0, 1000000]", read=LLAMA3
    )
    rope_original_sequence: int = key(
        8192, "llama3 scaling: context length of the original model, tokens", span="[1, inf)", read=LLAMA3
    )

    def derived(self) -> "ModelConfig":
        """Returns a copy in which every size of 0 is filled in."""
        wide = -(-8 * self.embed // 3)
        return replace(
            self,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or self.embed // max(self.heads, 1),
            mlp=self.mlp or wide + -wide % MLP_MULTIPLE,
        )

    @property
    def period(self) -> int:
        """Layers after which the pattern repeats; a pattern longer than the stack is truncated."""
        return min(len(self.pattern), self.layers)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer of the stack."""
        return tuple(self.pattern[index % self.period] for index in range(self.layers))

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table: `vocab` rounded up, so that it can be sharded."""
        return self.vocab + -self.vocab % MULTIPLE_OF_VOCAB

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it.

        Sizes of 0 are not derived yet.
        """
        return self._kv_heads(), self._width(), self._head_dim(), self._pattern(), self._window(), self._rope()

    def _kv_heads(self) -> Iterator[Problem]:
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            fits = max(n for n in range(1, kv_heads + 1) if self.heads % n == 0)
            yield (
                "model.kv_heads",
                f"{kv_heads} must divide model.heads={self.heads}; the next valid value is {fits}",
            )

    def _width(self) -> Iterator[Problem]:
        pairs = 2 * self.heads  # RoPE rotates pairs
        if not self.head_dim and self.embed % pairs:
            rule = f"{self.embed} must be a multiple of twice model.heads={self.heads}, unless model.head_dim is set"
            yield "model.embed", f"{rule}; the next valid value is {self.embed - self.embed % pairs or pairs}"

    def _head_dim(self) -> Iterator[Problem]:
        if self.head_dim % 2:
            rule = f"{self.head_dim} must be even, since RoPE rotates pairs"
            yield "model.head_dim", f"{rule}; the next valid value is {self.head_dim + 1}"

    def _pattern(self) -> Iterator[Problem]:
        if unknown := [kind for kind in self.pattern if kind not in KINDS]:
            yield "model.pattern", not_one_of(unknown[0], KINDS)
        elif not self.pattern:
            yield "model.pattern", f"must contain at least one of {', '.join(KINDS)}"

    def _window(self) -> Iterator[Problem]:
        if LOCAL in self.pattern and self.window is None:
            yield "model.window", f"is missing, but model.pattern={show(self.pattern)} has local layers"

    def _rope(self) -> Iterator[Problem]:
        if self.rope_scaling == "llama3" and self.rope_low >= self.rope_high:
            yield "model.rope_low", f"{self.rope_low} must be below model.rope_high={self.rope_high}"
