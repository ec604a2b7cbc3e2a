"""Rematerialisation: which activations are saved for the backward pass."""

from collections.abc import Iterator
from dataclasses import dataclass

from nnxtrain.config.echo import echo
from nnxtrain.config.key import Problem, key
from nnxtrain.config.lookup import not_one_of
from nnxtrain.config.reads import when
from nnxtrain.tags import LAYER_INPUT, TAGS

ACTIONS = ("save", "offload", "recompute")


@dataclass(frozen=True, kw_only=True)
class RematConfig:
    """Rematerialisation of each layer: which activations are saved for the backward pass."""

    policy: str = key(
        "none",
        "what is saved for the backward pass: everything (none), only the inputs of layers (full), "
        "or something between; see docs/remat.md",
        choices=(
            "none",
            "full",
            "dots",
            "dots_no_batch",
            "attention",
            "mlp",
            "qkv",
            "attention_layer",
            "projections",
            "projections_attention",
            "qkv_offload",
            "projections_offload",
            "custom",
        ),
    )
    tags: tuple[str, ...] = key(
        (),
        "policy=custom: TAG=save, TAG=offload or TAG=recompute; tags that are not listed are recomputed",
        read=when("remat.policy", "custom"),
    )

    @property
    def actions(self) -> dict[str, str]:
        """The action for each tag in `tags`; the others are recomputed."""
        return dict(word.split("=", 1) for word in self.tags)

    def checks(self) -> tuple[Iterator[Problem], ...]:
        """Returns the checks of this section; each yields what is wrong and how to fix it."""
        return self._custom(), self._tags()

    def _custom(self) -> Iterator[Problem]:
        if not self.tags and self.policy == "custom":
            yield (
                "remat.policy",
                "custom needs remat.tags, such as remat.tags=mlp_hidden=save; policy full saves no tag",
            )

    def _tags(self) -> Iterator[Problem]:
        seen: set[str] = set()
        for word in self.tags:
            tag, equals, action = word.partition("=")
            shown = echo(word)
            if not equals:
                yield "remat.tags", f"'{shown}' has no action; write {shown}=save, {shown}=offload or {shown}=recompute"
            elif tag not in TAGS:
                yield "remat.tags", not_one_of(tag, TAGS)
            elif action not in ACTIONS:
                yield "remat.tags", f"{shown}: {not_one_of(action, ACTIONS)}"
            elif tag in seen:
                yield "remat.tags", f"{tag} occurs twice"
            elif word == f"{LAYER_INPUT}=recompute":
                yield "remat.tags", f"{word}: there is nothing to recompute it from; save or offload it"
            seen.add(tag)
