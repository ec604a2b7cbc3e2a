"""Evaluation between steps: losses on held-out sets, and samples of text."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnxtrain.build.feed import Data
from nnxtrain.config.schema import Config
from nnxtrain.data.batches import eval_batches
from nnxtrain.loops.eval_loop import Evaluation, evaluate
from nnxtrain.models.sample import make_sampler
from nnxtrain.types import PRNG, Bind, Tokenizer


def make_evaluators(data: Data, bind: Bind) -> dict[str, Callable[[Callable[[], bool]], Evaluation | None]]:
    """Returns for each held-out set a function that evaluates the model of `bind`; None if `stops()` becomes true."""
    program, config = data.program, data.program.config
    eval_step = bind(program.eval_step)

    def evaluator(name: str) -> Callable[[Callable[[], bool]], Evaluation | None]:
        def run(stops: Callable[[], bool]) -> Evaluation | None:
            rows, size = data.dataset.held_out[name], config.eval_rows
            batches = eval_batches(rows, size, vocab=program.tokenizer.size, limit=config.eval.max_batches)
            bytes_of = program.tokenizer.token_bytes
            return evaluate(eval_step, batches, put=data.put_eval, token_bytes=bytes_of, stops=stops)

        return run

    return {name: evaluator(name) for name in data.dataset.held_out}


def make_writer(config: Config, tokenizer: Tokenizer, bind: Bind) -> Callable[[], str]:
    """Returns a function that continues `generate.prompt` with the model of `bind`."""
    words = config.generate
    sample = bind(
        make_sampler(
            tokens=words.tokens,
            context=config.batch.sequence,
            temperature=words.temperature,
            top_k=words.top_k,
            eos=tokenizer.eos,
        )
    )

    def write() -> str:
        begin = [tokenizer.bos] if tokenizer.bos >= 0 else []
        prompt = np.concatenate([begin, tokenizer.encode(words.prompt)]).astype(np.int32)
        ids, length = sample(prompt, jax.random.key(words.seed, impl=PRNG))
        return tokenizer.decode(np.asarray(ids)[: int(length)])

    return write


def bind_to(model: nnx.Module) -> Bind:
    """Returns a function that compiles functions of `model`; its arrays are not changed."""
    graph, weights = nnx.split(model)

    def bind(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(lambda weights, *args: function(nnx.merge(graph, weights), *args))
        return lambda *args: compiled(weights, *args)

    return bind
