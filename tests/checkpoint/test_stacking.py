"""Scanned and unrolled layers hold the same numbers, and two trees that differ say where."""

import jax
import numpy as np
import pytest

from nnxtrain.checkpoint.stacking import (
    Leaf,
    cut_leaf,
    differences,
    in_layout_of,
    join_leaves,
    leaf_of,
    period_of,
    scanned,
    targets,
    unrolled,
)

TYPES = (np.float32, np.int32, np.float16, np.uint8)


def random_tree(seed: int) -> dict[tuple[str, ...], np.ndarray]:
    """Returns a scanned tree of random depth, pattern, names, shapes and types; moments hold the stack deeper down."""
    draw = np.random.default_rng(seed)
    groups, period = int(draw.choice([1, 2, 3, 11, 12])), int(draw.choice([1, 2, 3, 11]))
    numbers = [(str(place),) for place in range(period)] if period > 1 else [()]
    rest = int(draw.integers(0, period))
    tree = {("embedding", "table"): draw.standard_normal((5, 3)).astype(np.float32), ("step",): np.int32(7)[None]}
    for head in ((), ("opt_state", "1", "mu"), ("opt_state", "1", "nu"))[: draw.integers(1, 4)]:
        for name in ("kernel", "scale", "layers", "0")[: draw.integers(1, 5)]:
            shape, kind = tuple(draw.integers(0, 4, draw.integers(0, 3))), draw.choice(TYPES)
            for number in numbers:
                leaf = draw.integers(0, 100, (groups, *shape)).astype(kind)
                tree[(*head, "stack", "layer", *number, "attention", name)] = leaf
            for index in range(rest):
                leaf = draw.integers(0, 100, shape).astype(kind)
                tree[(*head, "stack", "rest", str(index), "attention", name)] = leaf
    return tree


def take(leaf: np.ndarray, index: int) -> np.ndarray:
    return leaf[index]


@pytest.mark.parametrize("seed", range(40))
def test_there_and_back_is_bitwise(seed):
    """Layers sorted as text (0, 1, 10, 11, 2) would come back in another order; a cast would lose bits (B14)."""
    tree = random_tree(seed)
    apart = unrolled(tree, take)
    assert period_of(tree) > 0
    assert period_of(apart) == 0
    back = scanned(apart, np.stack, period=period_of(tree))
    assert back.keys() == tree.keys()
    for path, leaf in tree.items():
        assert back[path].dtype == leaf.dtype
        assert back[path].shape == leaf.shape
        assert back[path].tobytes() == leaf.tobytes()


@pytest.mark.parametrize("seed", range(40))
def test_shapes_convert_as_arrays_do(seed):
    """The comparison before a load works on shapes alone; another answer there would refuse what fits."""
    tree = random_tree(seed)
    leaves = {path: leaf_of(leaf) for path, leaf in tree.items()}
    apart = {path: leaf_of(leaf) for path, leaf in unrolled(tree, take).items()}
    assert unrolled(leaves, cut_leaf) == apart
    assert scanned(apart, join_leaves, period=period_of(tree)) == leaves


def test_layers_come_apart_by_their_number():
    """Layer 10 of the stack is `layers/10`, not the third in the order of text."""
    leaf = np.arange(12)[:, None] * np.ones((1, 2))
    apart = unrolled({("stack", "layer", "w"): leaf}, take)
    assert len(apart) == 12
    for index in range(12):
        np.testing.assert_array_equal(apart["stack", "layers", str(index), "w"], [index, index])


@pytest.mark.parametrize(("layers", "period"), [(8, 3), (9, 3), (2, 2), (5, 4), (23, 11)])
def test_layers_of_a_pattern_come_apart_by_their_number(layers, period):
    """Layer `i` is group `i // period` at place `i % period`; what is left over comes last (B14)."""
    apart = {("stack", "layers", str(index), "w"): np.array([index, -index]) for index in range(layers)}
    tree = scanned(apart, np.stack, period=period)
    for place in range(period):
        want = np.arange(place, layers - layers % period, period)
        np.testing.assert_array_equal(tree["stack", "layer", str(place), "w"], np.stack([want, -want], axis=1))
    for number in range(layers % period):
        np.testing.assert_array_equal(tree["stack", "rest", str(number), "w"][0], layers - layers % period + number)
    back = unrolled(tree, take)
    assert back.keys() == apart.keys()
    for path, leaf in apart.items():
        np.testing.assert_array_equal(back[path], leaf)


def test_one_pattern_becomes_another():
    """A run may go on with another pattern; `[local, local, global]` and `[local, global]` group the same layers."""
    apart = {("stack", "layers", str(index), "w"): np.array([index]) for index in range(8)}
    threes, twos = (scanned(apart, np.stack, period=period) for period in (3, 2))
    got = in_layout_of(twos, threes, take=take, join=np.stack)
    assert got.keys() == twos.keys()
    for path, leaf in twos.items():
        np.testing.assert_array_equal(got[path], leaf)


def test_a_kind_of_layer_with_parameters_of_its_own_keeps_them():
    """A leaf that only some layers have is stacked over those."""
    apart = {("stack", "layers", str(index), "w"): np.array([index]) for index in range(5)}
    apart |= {("stack", "layers", str(index), "sink"): np.array([index]) for index in (1, 3)}
    tree = scanned(apart, np.stack, period=2)
    assert ("stack", "layer", "0", "sink") not in tree
    assert unrolled(tree, take).keys() == apart.keys()


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_that_has_the_layout_already_is_left_alone(seed):
    """A second conversion would stack the stack."""
    tree = random_tree(seed)
    apart = unrolled(tree, take)
    assert in_layout_of(tree, tree, take=take, join=np.stack) is tree
    assert in_layout_of(apart, apart, take=take, join=np.stack) is apart
    assert in_layout_of(apart, tree, take=take, join=np.stack).keys() == apart.keys()
    assert in_layout_of(tree, apart, take=take, join=np.stack).keys() == tree.keys()


def test_a_tree_without_a_stack_is_left_alone():
    """The guard's counters have no layers in either layout."""
    plain = {("guard", "skipped"): np.int32(1)[None]}
    assert in_layout_of(plain, plain, take=take, join=np.stack) is plain


def test_every_difference_is_a_line_with_path_and_both_shapes():
    """`trees differ` alone sends people through a wall of text (B14)."""
    saved = {("a", "w"): Leaf((4, 2), "float32"), ("old",): Leaf((), "int32"), ("same",): Leaf((1,), "int32")}
    wanted = {("a", "w"): Leaf((4, 3), "float32"), ("new",): Leaf((5,), "bfloat16"), ("same",): Leaf((1,), "int32")}
    lines = differences(saved, wanted)
    assert len(lines) == 3
    for path, words in {
        "new": ("missing", "bfloat16[5]"),
        "old": ("only in the checkpoint", "int32[]"),
        "a/w": ("float32[4, 2]", "float32[4, 3]"),
    }.items():
        (line,) = [line for line in lines if line.startswith(f"{path}:")]
        assert all(word in line for word in words)


def test_another_type_is_a_difference():
    """A silent cast from float32 to bfloat16 loses two thirds of the bits."""
    assert differences({("w",): Leaf((2,), "float32")}, {("w",): Leaf((2,), "bfloat16")})
    assert not differences({("w",): Leaf((2,), "float32")}, {("w",): Leaf((2,), "float32")})


def test_saved_arrays_are_read_to_where_they_are_wanted_in_either_layout():
    """An array that is read whole and cut afterwards needs the memory of all devices on one."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "fsdp")

    def lying(shape, *entries):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    scanned_tree = {("stack", "layer", "kernel"): lying((3, 4, 2), None, "fsdp"), ("norm",): lying((4,), "fsdp")}
    unrolled_tree = {("stack", "layers", str(at), "kernel"): lying((4, 2), "fsdp") for at in range(3)}
    unrolled_tree |= {("norm",): lying((4,), "fsdp")}
    for saved, wanted in ((scanned_tree, unrolled_tree), (unrolled_tree, scanned_tree), (scanned_tree, scanned_tree)):
        leaves = {path: Leaf(leaf.shape, "float32") for path, leaf in saved.items()}
        got = targets(leaves, wanted)
        assert {path: leaf.sharding.shard_shape(leaf.shape) for path, leaf in got.items()} == {
            path: leaf.sharding.shard_shape(leaf.shape) for path, leaf in saved.items()
        }
    alien = targets({("norm",): Leaf((3,), "float32")}, scanned_tree)
    assert alien["norm",].sharding.shard_shape((3,)) == (3,)
