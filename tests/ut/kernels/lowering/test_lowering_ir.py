"""Reading MLIR's generic form, and what its operations mean; on small texts, without the compiler."""

# ruff: noqa: E501 MLIR has one operation a line

from __future__ import annotations

import pytest

from vllm_ascend_ext.kernels.lowering import accesses, counts, hivm, ir, loops
from vllm_ascend_ext.kernels.lowering.accesses import Form
from vllm_ascend_ext.kernels.lowering.hivm import Kernel
from vllm_ascend_ext.kernels.lowering.ir import Place, Type
from vllm_ascend_ext.kernels.lowering.loops import Pace
from vllm_ascend_ext.kernels.lowering.ttir import Source

UB = "#hivm.address_space<ub>"
GM = "#hivm.address_space<gm>"

# A kernel of two arguments after three hidden ones: a loop over tiles that loads, adds and stores, and inside it a loop
# that the compiler made of the shift at line 7.
FINAL = f"""
"builtin.module"() ({{
  "func.func"() <{{arg_attrs = [{{hacc.arg_type = #hacc.arg_type<ffts>}}, {{}}, {{}}, {{}}, {{}}, {{}}], sym_name = "k"}}> ({{
  ^bb0(%arg0: i64 loc(unknown), %arg1: memref<?xf32, {GM}> loc(unknown), %arg2: i32 loc(unknown), %arg3: i32 loc(unknown), %arg4: i32 loc(unknown), %arg5: i32 loc(unknown)):
    %0 = "arith.constant"() <{{value = 0 : index}}> : () -> index loc(unknown)
    %1 = "arith.constant"() <{{value = 1 : index}}> : () -> index loc(unknown)
    %2 = "arith.constant"() <{{value = 64 : index}}> : () -> index loc(unknown)
    %3 = "arith.constant"() <{{value = 128 : i64}}> : () -> i64 loc(unknown)
    %4 = "arith.index_cast"(%arg2) : (i32) -> index loc(unknown)
    %5 = "hivm.hir.pointer_cast"(%3) <{{operandSegmentSizes = array<i32: 1, 0>}}> : (i64) -> memref<64xf32, {UB}> loc(unknown)
    "scf.for"(%0, %4, %2) ({{
    ^bb0(%arg6: index loc(unknown)):
      %6 = "memref.reinterpret_cast"(%arg1, %arg6) : (memref<?xf32, {GM}>, index) -> memref<64xf32, strided<[1], offset: ?>, {GM}> loc("k.py":5:8)
      %7 = "memref.subview"(%6, %4) : (memref<64xf32, strided<[1], offset: ?>, {GM}>, index) -> memref<?xf32, strided<[1], offset: ?>, {GM}> loc("k.py":5:8)
      "func.call"(%7, %5) <{{callee = @load_gm_to_ubuf_1d_float}}> : (memref<?xf32, strided<[1], offset: ?>, {GM}>, memref<64xf32, {UB}>) -> () loc("k.py":5:8)
      "hivm.hir.set_flag"() : () -> () loc(unknown)
      "scf.for"(%0, %2, %1) ({{
      ^bb0(%arg7: index loc(unknown)):
        %8 = "memref.load"(%5, %arg7) : (memref<64xf32, {UB}>, index) -> f32 loc(callsite("h.py":7:4 at "k.py":6:8))
        %9 = "arith.shrsi"(%8, %8) : (i32, i32) -> i32 loc(callsite("h.py":7:4 at "k.py":6:8))
        "memref.store"(%9, %5, %arg7) : (i32, memref<64xf32, {UB}>, index) -> () loc(callsite("h.py":7:4 at "k.py":6:8))
        "scf.yield"() : () -> () loc(unknown)
      }}) : (index, index, index) -> () loc(callsite("h.py":7:4 at "k.py":6:8))
      "func.call"(%5, %5) <{{callee = @vadd_1d_float}}> : (memref<64xf32, {UB}>, memref<64xf32, {UB}>) -> () loc("k.py":6:8)
      "func.call"(%5, %6) <{{callee = @store_ubuf_to_gm_1d_float}}> : (memref<64xf32, {UB}>, memref<64xf32, strided<[1], offset: ?>, {GM}>) -> () loc("k.py":8:8)
      "scf.yield"() : () -> () loc(unknown)
    }}) : (index, index, index) -> () loc("k.py":4:4)
    "func.return"() : () -> () loc(unknown)
  }}) {{hivm.func_core_type = 1 : i32}} : () -> () loc("k.py":1:0)
}}) {{dlti.spec = #spec<"UB_SIZE", 1572864 : i32>}} : () -> () loc(unknown)
"""

SOURCE = """
"builtin.module"() ({
  "tt.func"() <{sym_name = "k"}> ({
  ^bb0(%arg0: !tt.ptr<f32> loc(unknown), %arg1: i32 loc(unknown)):
    %0 = "arith.constant"() <{value = 0 : i32}> : () -> i32 loc(unknown)
    "scf.for"(%0, %arg1, %0) ({
    ^bb0(%arg2: i32 loc(unknown)):
      %1 = "arith.shrsi"(%0, %0) : (i32, i32) -> tensor<64xi32> loc(callsite("h.py":7:4 at "k.py":6:8))
      "scf.yield"() : () -> () loc(unknown)
    }) : (i32, i32, i32) -> () loc("k.py":4:4)
    "tt.return"() : () -> () loc(unknown)
  }) : () -> () loc("k.py":1:0)
}) : () -> () loc(unknown)
"""


def final_kernel() -> Kernel:
    (function,) = hivm.entries(ir.parse(FINAL), "k")
    return Kernel(function, ("x_ptr", "n"))


def source() -> Source:
    return Source(ir.parse(SOURCE), "k")


# ---------------------------------------------------------------- the reader


def test_operations_have_names_types_regions_and_places() -> None:
    (function,) = ir.parse(FINAL)
    ops = list(function.walk())
    load = next(op for op in ops if op.symbol == "load_gm_to_ubuf_1d_float")
    assert [op.name for op in load.ancestors()] == ["scf.for", "func.func", "builtin.module"]
    assert load.operands == ("%7", "%5")
    assert load.operand_type(1) == Type((64,), "f32", "ub")
    assert load.location == (Place("k.py", 5, 8),)
    shift = next(op for op in ops if op.name == "arith.shrsi")
    assert shift.location == (Place("h.py", 7, 4), Place("k.py", 6, 8))
    assert function.definition("%7") is not None
    assert function.arguments == tuple(f"%arg{i}" for i in range(6))
    assert ir.module_attributes(FINAL) == 'dlti.spec = #spec<"UB_SIZE", 1572864 : i32>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memref<64x?xbf16, strided<[?, 1], offset: ?>, #hivm.address_space<gm>>", Type((64, None), "bf16", "gm")),
        ("tensor<8x1024x!tt.ptr<i32>>", Type((8, 1024), "!tt.ptr<i32>")),
        ("tensor<f32>", Type((), "f32")),
        ("!tt.ptr<i32>", None),
        ("i32", None),
    ],
)
def test_shaped_types_are_read(text: str, expected: Type | None) -> None:
    assert ir.parse_type(text) == expected


def test_several_results_branches_and_strings_with_brackets_are_read() -> None:
    text = """
    "builtin.module"() ({
      "func.func"() <{sym_name = "f(}"}> ({
        %0:2 = "a.b"() <{note = "} -> ({"}> : () -> (i32, memref<4xf32>) loc("a (b).py":1:2)
        "cf.cond_br"(%0#0)[^bb1, ^bb2] <{n = 1 : i32}> : (i32) -> () loc(unknown)
      ^bb1:
        "scf.if"(%0#0) ({
          "c.d"() : () -> () loc(unknown)
        }, {
        }) {unlikely} : (i32) -> () loc(unknown)
      }) : () -> () loc(unknown)
    }) : () -> () loc(unknown)
    """
    (function,) = ir.parse(text)
    first, branch, condition, inner = function.walk()
    assert function.name == "f(}"
    assert (first.results, first.result_types) == (("%0",), ("i32", "memref<4xf32>"))
    assert first.location == (Place("a (b).py", 1, 2),)
    assert branch.operands == ("%0#0",)
    assert function.definition("%0#1") is first
    assert [len(region) for region in condition.regions] == [1, 0]
    assert condition.attribute("unlikely") == ""
    assert inner.parent is condition


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("func.func @f() {", "line 1 is not an operation in MLIR's generic form: 'func.func @f() {'"),
        ('"builtin.module"() ({', "the text ends inside builtin.module"),
    ],
)
def test_other_text_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(ir.IRError) as caught:
        ir.parse(text)
    assert words in str(caught.value)


# ---------------------------------------------------------------- what it means


def test_a_tile_loop_and_a_made_loop_are_told_apart() -> None:
    tile, made = loops.find(final_kernel(), source())
    assert (tile.in_source, tile.pace, str(tile.trips)) == (True, Pace.NONE, "max(cdiv(n, 64), 0)")
    assert (tile.transfers, tile.vector_calls, tile.element_steps) == (2, 1, 0)
    assert (made.in_source, made.pace, str(made.trips)) == (False, Pace.ELEMENT, "64")
    assert (made.element_steps, made.global_steps, dict(made.operations)) == (2, 0, {"arith.shrsi": 1})
    assert made.around == (tile,)


def test_counts_multiply_through_the_loops() -> None:
    counted = counts.count(final_kernel())
    assert str(counted.bytes_in) == "256 x [cdiv(n, 64)]"
    assert str(counted.scalar_steps) == "192 x [cdiv(n, 64)]"
    assert counted.bytes_out.value({"n": 129}) == 3 * 256
    assert counted.vector_elements.value({"n": 64}) == 64
    assert counted.syncs.value({"n": 64}) == 1
    assert counted.scalar_steps.value({}) is None


def test_a_clamped_transfer_is_certain_but_for_its_last_trip() -> None:
    """Three tiles of 256 bytes are loaded clamped and stored whole: two loads and three stores are certain."""
    certain = counts.count(final_kernel()).certain_transfers[256.0]
    assert certain.value({"n": 129}) == 2 + 3


def test_the_plan_s_peak_is_its_highest_address() -> None:
    assert final_kernel().peak_bits == 128 * 8 + 64 * 32


def test_two_reads_through_one_pointer_are_two_values() -> None:
    """A loop from one read to another must not look as if it had no trips."""
    text = FINAL.replace(
        '%4 = "arith.index_cast"(%arg2) : (i32) -> index loc(unknown)',
        '%20 = "memref.load"(%arg1, %0) : (memref<?xf32, gm>, index) -> i32 loc("k.py":3:4)\n'
        '    %21 = "memref.load"(%arg1, %1) : (memref<?xf32, gm>, index) -> i32 loc("k.py":3:4)\n'
        '    %4 = "arith.subi"(%20, %21) : (i32, i32) -> i32 loc(unknown)',
    )
    kernel = Kernel(hivm.entries(ir.parse(text), "k")[0], ("x_ptr", "n"))
    assert str(kernel.expr("%4")) == "*x_ptr@3 - *x_ptr@3'"
    assert kernel.expr("%4").value({"*x_ptr@3": 7, "*x_ptr@3'": 3}) == 4
    assert kernel.expr("%20").value({"*x_ptr": 5}) == 5


MASKED = """
"builtin.module"() ({
  "tt.func"() <{sym_name = "k"}> ({
  ^bb0(%arg0: !tt.ptr<f32> loc(unknown), %arg1: i32 loc(unknown)):
    %0 = "tt.make_range"() <{end = 64 : i32, start = 0 : i32}> : () -> tensor<64xi32> loc(unknown)
    %1 = "tt.splat"(%arg1) : (i32) -> tensor<64xi32> loc(unknown)
    %2 = "arith.cmpi"(%1, %0) <{predicate = 4 : i64}> : (tensor<64xi32>, tensor<64xi32>) -> tensor<64xi1> loc("k.py":3:8)
    %3 = "tt.splat"(%arg0) : (!tt.ptr<f32>) -> tensor<64x!tt.ptr<f32>> loc(unknown)
    "tt.store"(%3, %0, %2) : (tensor<64x!tt.ptr<f32>>, tensor<64xi32>, tensor<64xi1>) -> () loc("k.py":4:8)
    "tt.return"() : () -> () loc(unknown)
  }) : () -> () loc("k.py":1:0)
}) : () -> () loc(unknown)
"""
WHOLE_TILE = """
    "memref.copy"(%0, %1) : (memref<64xf32, strided<[1]>>, memref<64xf32>) -> () loc("k.py":4:8)
    %2 = "arith.select"(%3, %4, %5) : (tensor<64xi1>, tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32> loc("k.py":4:8)
    "bufferization.materialize_in_destination"(%2, %0) : (tensor<64xf32>, memref<64xf32, strided<[1]>>) -> () loc("k.py":4:8)
"""
CLAMPED = """
    "bufferization.materialize_in_destination"(%2, %0) : (tensor<?xf32>, memref<?xf32, strided<[1]>>) -> () loc("k.py":4:8)
"""


def in_function(body: str) -> list[ir.Function]:
    head = '"builtin.module"() ({\n"func.func"() <{sym_name = "k"}> ({\n'
    return ir.parse(head + body + "}) : () -> () loc(unknown)\n}) : () -> () loc(unknown)\n")


@pytest.mark.parametrize(("body", "form"), [(WHOLE_TILE, Form.UNCLAMPED), (CLAMPED, Form.CLAMPED), ("", Form.UNKNOWN)])
def test_a_store_is_clamped_unless_it_is_read_selected_and_written_whole(body: str, form: Form) -> None:
    body = body or '"x.y"() : () -> () loc(unknown)\n'
    (access,) = accesses.find(Source(ir.parse(MASKED), "k"), in_function(body))
    assert access.form is form
    if form is Form.UNCLAMPED:
        assert [(term.kind, term.reason, term.place) for term in access.spoilers] == [
            ("form", "has the offset on its right side", Place("k.py", 3, 8))
        ]
