"""The data of a run: its corpora, and batches on their way to the devices."""

from dataclasses import dataclass

from nnxtrain.build.program import Program
from nnxtrain.config.lookup import lookup
from nnxtrain.data.batches import START, Order, Position, TrainBatches
from nnxtrain.data.stream import StreamBatches
from nnxtrain.errors import ConfigError
from nnxtrain.hardware.chips import peak_flops
from nnxtrain.metrics.recorder import Scale
from nnxtrain.sharding.rows import own_rows, put_rows
from nnxtrain.types import Batch, Dataset, RowSpec, RowStream


@dataclass(frozen=True)
class Data:
    """Batches on their way to the devices of a program."""

    program: Program
    dataset: Dataset
    train: TrainBatches | StreamBatches

    def put_train(self, batch: Batch) -> Batch:
        """Brings the rows of a batch that this process read, leaves `[m b ...]`, to the devices."""
        cut, layout = self.program.cut, self.program.layout
        return put_rows(batch, layout, own_rows(layout, cut.rows), rows=cut.rows, row_axis=1)

    def put_eval(self, batch: Batch) -> Batch:
        """Brings a batch, leaves `[b ...]`, to the devices."""
        rows = self.program.config.eval_rows
        return put_rows(batch, self.program.layout, range(rows), rows=rows, row_axis=0)

    def steps(self, done: int = 0, position: Position = START) -> int:
        """Returns the steps of the run: those asked for, or fewer where the data ends before.

        Args:
            done: steps that are behind.
            position: of the data after them.
        """
        asked, left = self.program.config.steps, self.train.count(position)
        return asked if left is None else min(asked, done + left)


def open_data(program: Program) -> Data:
    """Opens the corpora, tokenising them if that was not done before.

    Raises:
        ConfigError: a path or pattern names no data.
        DataError: the data is not what it should be.
    """
    config = program.config
    spec = RowSpec(config.batch.sequence, program.tokenizer, config.seed)
    dataset = lookup(program.registry.datasets, config.data.source, key="data.source")(config.data, spec)
    order = Order(config.seed, config.data.shuffle, config.data.epochs, config.data.drop_remainder)
    best = config.checkpoint.keep_best
    if best is not None and best not in dataset.held_out:
        there = ", ".join(dataset.held_out) or "none"
        raise ConfigError(f"checkpoint.keep_best={best} is no held-out set; there are: {there}")
    return Data(program, dataset, _train_batches(program, dataset, order))


def _train_batches(program: Program, dataset: Dataset, order: Order) -> TrainBatches | StreamBatches:
    vocab = program.tokenizer.size
    if not isinstance(dataset.train, RowStream):
        own = own_rows(program.layout, program.cut.rows)
        return TrainBatches(dataset.train, program.cut, vocab=vocab, order=order, own=own)
    stream = f"data.source={program.config.data.source} is a stream"
    if order.shuffle:
        raise ConfigError(f"data.shuffle=true: {stream}, read in its own order; set data.shuffle=false")
    if len({device.process_index for device in program.mesh.devices.flat}) > 1:
        rule = f"distributed.processes: {stream}, which one process reads; each of several would read all of its rows"
        raise ConfigError(f"{rule}; run one process, or use a source with random access")
    return StreamBatches(dataset.train, program.cut, vocab=vocab, order=order)


def make_scale(data: Data, *, steps: int) -> Scale:
    """Returns what turns counts of this run of `steps` steps into rates and shares."""
    program = data.program
    peak = peak_flops(program.mesh.devices.flat[0].device_kind)
    work = program.flops_per_token
    return Scale(steps, work, peak and peak * program.mesh.size, data.train.epochs)
