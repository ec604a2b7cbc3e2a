"""What a compiled program sends, read from its text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nnxtrain.aot.hlo import Collective, Total, collectives, totals

MESH = {"data": 2, "stage": 1, "tensor": 4}

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def program(*lines, before=""):
    """Returns the text of a program whose entry holds `lines` and an argument `%p`."""
    entry = "\n  ".join(("%p = f32[8,128]{1,0:T(8,128)} parameter(0)", *lines))
    return (
        f"HloModule jit_f, is_scheduled=true\n{ADD}{before}\nENTRY %main (p: f32[8,128]) -> f32[] {{\n  {entry}\n}}\n"
    )


def all_reduce(groups, *, name="r", of="p"):
    """Returns a line that adds up over `groups`."""
    shape = "f32[8,128]{1,0:T(8,128)}"
    return f"%{name} = {shape} all-reduce(%{of}), channel_id=1, replica_groups={groups}, to_apply=%add"


def loop(body, *, turns=None, start=0, step=1, end=0):
    """Returns computations `%body` and `%condition` and the line of a loop, with its turns given or to be counted."""
    state = "(s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)})"
    computations = f"""
%body (state: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %state = {state} parameter(0)
  %step = s32[]{{:T(128)}} constant({step})
  %counter = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %array = f32[8,128]{{1,0:T(8,128)S(1)}} get-tuple-element(%state), index=1
  {body}
  %next = s32[]{{:T(128)}} add(%counter, %step)
  ROOT %out = {state} tuple(%next, /*index=1*/%r)
}}

%condition (seen: (s32[], f32[8,128])) -> pred[] {{
  %end = s32[]{{:T(128)}} constant({end})
  %seen = {state} parameter(0)
  %now = s32[]{{:T(128)}} get-tuple-element(%seen), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%now, %end), direction=LT
}}
"""
    known = f', backend_config={{"known_trip_count":{{"n":"{turns}"}}}}' if turns else ""
    lines = (
        f"%start = s32[] constant({start})",
        "%copied = s32[]{:T(128)} copy(%start)",
        f"%begin = {state} tuple(%copied, %p)",
        f"%loop = {state} while(%begin), condition=%condition, body=%body{known}",
    )
    return computations, lines


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tensor",)),
        ("{{0,4},{2,6},{1,5},{3,7}}", ("data",)),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "tensor")),
        ("{}", ("data", "tensor")),
        ("[2,4]<=[8]", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[1,8]<=[2,4]T(1,0)", ("data", "tensor")),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("tensor",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("data",)),
        ("mesh['axis_0'=8] {'axis_0'}", ("data", "tensor")),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1','axis_2'}", ("tensor",)),
    ],
)
def test_groups_in_each_form_name_the_axes_that_they_lie_along(groups, axes):
    """Rows taken for columns of the mesh, or a form that only one backend writes read as all devices, fail here."""
    size = {"data": 2, "tensor": 4}
    want = Collective("all-reduce", axes, 1, 4096, int(np.prod([size[name] for name in axes])))
    assert collectives(program(all_reduce(groups)), MESH) == [want]


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("{{0,5},{1,4},{2,7},{3,6}}", 2),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", 8),
        ("mesh['a'=8] {'a':(2)4}", 8),
    ],
)
def test_groups_of_no_set_of_axes_have_none(groups, size):
    """Half an axis, or devices across two, must not be charged to the axis."""
    assert collectives(program(all_reduce(groups)), MESH) == [Collective("all-reduce", (), 1, 4096, size)]


@pytest.mark.parametrize(
    ("pairs", "axes", "group"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("tensor",), 4),
        ("{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}", ("tensor",), 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{{0,5},{5,0}}", ("data", "tensor"), 8),
    ],
)
def test_a_permute_goes_along_the_axes_in_which_its_pairs_differ(pairs, axes, group):
    """A pipeline's permute has no pair from the last stage to the first, so whole rings are not to be looked for."""
    shape = "(f32[8,128]{1,0:T(8,128)}, f32[8,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}, u32[]{:S(2)})"
    text = program(
        f"%s = {shape} collective-permute-start(%p), channel_id=1, source_target_pairs={pairs}",
        "ROOT %d = f32[8,128]{1,0:T(8,128)S(1)} collective-permute-done(%s)",
    )
    assert collectives(text, MESH) == [Collective("collective-permute", axes, 1, 4096, group)]


@pytest.mark.parametrize("start", ["", "-start"])
@pytest.mark.parametrize(
    ("kind", "shapes", "bytes_"),
    [
        ("all-gather", ("f32[32,128]{1,0}", "(f32[8,128]{1,0}, f32[32,128]{1,0})"), 4 * 4096),
        ("all-reduce", ("f32[8,128]{1,0}", "f32[8,128]{1,0}"), 4096),
        ("reduce-scatter", ("f32[2,128]{1,0}", "((f32[8,128]{1,0}), f32[2,128]{1,0})"), 4096),
        ("all-to-all", ("f32[8,128]{1,0}", "((f32[8,128]{1,0}), f32[8,128]{1,0}, u32[])"), 4096),
    ],
)
def test_bytes_are_those_of_the_whole_array_whether_it_waits_or_not(kind, shapes, bytes_, start):
    """What begins an asynchronous one returns its operands too; `-done` would count it twice."""
    shape = shapes[bool(start)]
    done = f"%d = {shapes[0]} {kind}-done(%s)" if start else "%d = f32[] constant(0)"
    text = program(f"%s = {shape} {kind}{start}(%p), replica_groups=[2,4]<=[8], dimensions={{0}}", done)
    assert collectives(text, MESH) == [Collective(kind, ("tensor",), 1, bytes_, 4)]


def test_bytes_of_a_tuple_are_added_up():
    """Gradients travel together; numbers narrower than a byte and truth values count too."""
    shape = "(bf16[3,5]{1,0:T(8,128)(2,1)}, s4[7]{0}, /*index=2*/pred[9]{0}, f8e4m3fn[2]{0})"
    text = program(
        "%a = bf16[3,5]{1,0:T(8,128)(2,1)} constant({...})",
        "%b = s4[7]{0} constant({...})",
        "%c = pred[9]{0} constant({...})",
        "%d = f8e4m3fn[2]{0} constant({...})",
        f"%r = {shape} all-to-all(%a, %b, /*index=2*/%c, %d), replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}",
    )
    assert collectives(text, MESH) == [Collective("all-to-all", ("data",), 1, 30 + 4 + 9 + 2, 2)]


@pytest.mark.parametrize(
    ("numbers", "turns"),
    [
        ({"turns": 5, "end": 9}, 5),
        ({"end": 6}, 6),
        ({"end": 8, "step": 2}, 4),
        ({"end": 8, "step": 3}, 3),
        ({"end": 8, "start": 2}, 6),
    ],
)
def test_a_collective_in_a_loop_counts_once_a_turn(numbers, turns):
    """TPU text gives no turns, and the loops into which it makes a gather with a matrix product count by twos."""
    computations, lines = loop(all_reduce("[2,4]<=[8]", of="array"), **numbers)
    assert collectives(program(*lines, before=computations), MESH) == [
        Collective("all-reduce", ("tensor",), turns, 4096, 4)
    ]


def test_loops_within_loops_and_calls_multiply():
    """Layers within microbatches: a collective of the inner loop that counts once a step is off by hundreds."""
    computations, lines = loop(all_reduce("[2,4]<=[8]", of="array"), turns=6)
    outer, outer_lines = loop("%r = f32[8,128] call(%array), to_apply=%layers", turns=3)
    for name in ("body", "condition", "state", "out", "array"):
        outer = outer.replace(f"%{name} ", f"%outer_{name} ").replace(f"%{name})", f"%outer_{name})")
    layers = "\n  ".join(("%p = f32[8,128] parameter(0)", *lines))
    inner = f"{computations}\n%layers (p: f32[8,128]) -> f32[8,128] {{\n  {layers}\n}}\n"
    whole = outer_lines[-1].replace("%loop", "%outer").replace("=%condition", "=%outer_condition")
    text = program(*outer_lines[:-1], whole.replace("=%body", "=%outer_body"), before=inner + outer)
    assert [one.count for one in collectives(text, MESH)] == [18]


def test_a_loop_of_unknown_length_counts_once():
    """A guess from a number that happens to be near would be worse."""
    computations, lines = loop(all_reduce("[2,4]<=[8]", of="array"), end=6)
    unknown = computations.replace("ROOT %less = pred[]{:T(512)} compare(%now, %end)", "ROOT %less = pred[] not(%end)")
    assert [one.count for one in collectives(program(*lines, before=unknown), MESH)] == [1]


@pytest.mark.parametrize(
    "attributes", ["branch_computations={%left, %right}", "true_computation=%left, false_computation=%right"]
)
def test_branches_count_as_their_caller(attributes):
    """Stages of a pipeline may be branches."""
    branches = "".join(
        f"\n%{name} ({name}.p: f32[8,128]) -> f32[8,128] {{\n  %{name}.p = f32[8,128] parameter(0)\n"
        f"  ROOT {all_reduce(groups, name=f'{name}.r', of=f'{name}.p')}\n}}\n"
        for name, groups in {"left": "[2,4]<=[8]", "right": "[4,2]<=[2,4]T(1,0)"}.items()
    )
    text = program(f"ROOT %c = f32[8,128] conditional(%p, %p, %p), {attributes}", before=branches)
    assert [(one.axes, one.count) for one in collectives(text, MESH)] == [(("tensor",), 1), (("data",), 1)]


def test_an_asynchronous_computation_counts_where_it_begins():
    """Its end names it again."""
    wrapped = f"""
%wrapped (w: f32[8,128]) -> f32[8,128] {{
  %w = f32[8,128] parameter(0)
  ROOT {all_reduce("[2,4]<=[8]", of="w")}
}}
"""
    text = program(
        "%s = ((f32[8,128]), f32[8,128], s32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[8,128]), f32[8,128], s32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[8,128] async-done(%u), calls=%wrapped",
        before=wrapped,
    )
    assert [one.count for one in collectives(text, MESH)] == [1]


def test_a_gather_that_overlaps_on_tpu_counts_once():
    """It is written in the fusion that begins it, in each matrix product that carries it on, and in that of its end."""
    gather = 'f32[32,128]{{1,0}} all-gather(%{0}.p), replica_groups=[2,4]<=[8], frontend_attributes={{chain_id="0"}}'
    fusions = "".join(
        f"\n%{name} ({name}.p: f32[8,128]) -> f32[32,128] {{\n  %{name}.p = f32[8,128] parameter(0)\n"
        f"  %{name}.g = {gather.format(name)}\n  ROOT {root}\n}}\n"
        for name, root in {
            "one": '%begin = (f32[8,128], f32[32,128]) custom-call(%one.g), custom_call_target="AsyncCollectiveStart"',
            "async_collective_fusion.2": "%on = (f32[32,128]) tuple(%async_collective_fusion.2.g)",
            "three": '%end = f32[32,128] custom-call(%three.g), custom_call_target="AsyncCollectiveDone"',
        }.items()
    )
    text = program(
        "%a = (f32[8,128], f32[32,128]) fusion(%p), kind=kCustom, calls=%one",
        "%b = (f32[32,128]) fusion(%p), kind=kOutput, calls=%async_collective_fusion.2",
        "ROOT %c = f32[32,128] fusion(%p), kind=kCustom, calls=%three",
        before=fusions,
    )
    assert collectives(text, MESH) == [Collective("all-gather", ("tensor",), 1, 4 * 4096, 4)]


def test_an_all_reduce_in_a_scattering_fusion_of_tpu_is_a_reduce_scatter():
    """As an all-reduce it would seem to send twice the bytes."""
    fusion = f"""
%all-reduce-scatter.1 (whole: f32[8,128]) -> f32[2,128] {{
  %whole = f32[8,128] parameter(0)
  {all_reduce("{{0,1,2,3},{4,5,6,7}}", of="whole")}
  ROOT %slice = f32[2,128] dynamic-slice(%r), dynamic_slice_sizes={{2,128}}
}}
"""
    text = program("ROOT %f = f32[2,128] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1", before=fusion)
    assert collectives(text, MESH) == [Collective("reduce-scatter", ("tensor",), 1, 4096, 4)]


def test_totals_add_up_by_kind_and_axes_with_the_bytes_on_a_ring():
    """An all-reduce is a reduce-scatter and an all-gather; nobody sends to itself."""
    found = [
        Collective("all-gather", ("tensor",), 3, 400, 4),
        Collective("all-gather", ("data",), 1, 400, 2),
        Collective("all-gather", ("tensor",), 1, 800, 4),
        Collective("all-reduce", ("tensor",), 1, 400, 4),
        Collective("reduce-scatter", ("tensor",), 1, 440, 4),
        Collective("all-to-all", ("tensor",), 1, 120, 4),
        Collective("collective-permute", ("tensor",), 2, 20, 4),
        Collective("all-reduce", (), 1, 64, 1),
    ]
    assert totals(found) == [
        Total("all-gather", ("tensor",), 4, 2000, 1500),
        Total("all-reduce", ("tensor",), 1, 400, 600),
        Total("reduce-scatter", ("tensor",), 1, 440, 330),
        Total("all-gather", ("data",), 1, 400, 200),
        Total("all-to-all", ("tensor",), 1, 120, 90),
        Total("collective-permute", ("tensor",), 2, 40, 40),
        Total("all-reduce", (), 1, 64, 0),
    ]


def test_a_compiled_program_has_the_collectives_that_were_written():
    """The text of the compiler changes from version to version; a sum that reads as none looks like a fast program."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))

    def local(x, weights):
        def layer(x, weight):
            return jax.lax.psum(jnp.tanh(x @ weight), "tensor"), None

        x, _ = jax.lax.scan(layer, x, weights)
        return jax.lax.all_gather(x, "data", tiled=True)

    specs = {"in_specs": (P("data"), P()), "out_specs": P(), "check_vma": False}
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    weights = jax.ShapeDtypeStruct((5, 32, 32), jnp.float32, sharding=NamedSharding(mesh, P()))
    text = jax.jit(jax.shard_map(local, mesh=mesh, **specs)).lower(x, weights).compile().as_text()
    assert collectives(text, mesh.shape) == [
        Collective("all-reduce", ("tensor",), 5, 8 * 32 * 4, 4),
        Collective("all-gather", ("data",), 1, 16 * 32 * 4, 2),
    ]
