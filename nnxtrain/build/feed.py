"""The data of a run: its corpora, and batches on the devices."""

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
    """The data of a program: training batches and held-out sets."""

    program: Program
    dataset: Dataset
    train: TrainBatches | StreamBatches

    def put_train(self, batch: Batch) -> Batch:
        """Moves this process's rows of a batch, leaves `[m b ...]`, to the devices."""
        rows, layout = self.program.cut.rows, self.program.layout
        return put_rows(batch, layout, own_rows(layout, rows), rows=rows, row_axis=1)

    def put_eval(self, batch: Batch) -> Batch:
        """Moves a batch, leaves `[b ...]`, to the devices."""
        rows = self.program.config.eval_rows
        return put_rows(batch, self.program.layout, range(rows), rows=rows, row_axis=0)

    def steps(self, done: int = 0, position: Position = START) -> int:
        """Returns the number of steps of the run: `steps`, or fewer if the data ends before.

        Args:
            done: steps already done.
            position: in the data after them.
        """
        asked, left = self.program.config.steps, self.train.count(position)
        return asked if left is None else min(asked, done + left)


def open_data(program: Program) -> Data:
    """Opens the corpora, tokenising them if they are not cached.

    Raises:
        ConfigError: a path or pattern matches no data.
        DataError: the data is invalid.
    """
    config = program.config
    spec = RowSpec(config.batch.sequence, program.tokenizer, config.seed)
    dataset = lookup(program.registry.datasets, config.data.source, key="data.source")(config.data, spec)
    order = Order(config.seed, config.data.shuffle, config.data.epochs, config.data.drop_remainder)
    best = config.checkpoint.keep_best
    if best is not None and best not in dataset.held_out:
        there = ", ".join(dataset.held_out) or "none"
        raise ConfigError(f"checkpoint.keep_best={best} is not a held-out set; there are: {there}")
    return Data(program, dataset, _train_batches(program, dataset, order))


def _train_batches(program: Program, dataset: Dataset, order: Order) -> TrainBatches | StreamBatches:
    vocab = program.tokenizer.size
    if not isinstance(dataset.train, RowStream):
        own = own_rows(program.layout, program.cut.rows)
        return TrainBatches(dataset.train, program.cut, vocab=vocab, order=order, own=own)
    stream = f"data.source={program.config.data.source} is a stream"
    if order.shuffle:
        raise ConfigError(f"data.shuffle=true: {stream}, whose order is fixed; set data.shuffle=false")
    if len({device.process_index for device in program.mesh.devices.flat}) > 1:
        rule = f"distributed.processes: {stream}; each of several processes would read all of its rows"
        raise ConfigError(f"{rule}; run one process, or use a source with random access")
    return StreamBatches(dataset.train, program.cut, vocab=vocab, order=order)


def make_scale(data: Data, *, steps: int) -> Scale:
    """Returns what converts counts into rates and MFU, for a run of `steps` steps."""
    program = data.program
    peak = peak_flops(program.mesh.devices.flat[0].device_kind)
    work = program.flops_per_token
    return Scale(steps, work, peak and peak * program.mesh.size, data.train.epochs)
