"""Bytes to and from HBM, of texts in which each way to look at an array occurs once, against counts by hand."""

import pytest

from haliax_ext.hlo.memory import hbm_traffic
from haliax_ext.hlo.parser import parse_module

pytestmark = pytest.mark.quick

LAYERS, ROWS, COLUMNS = 16, 8, 128
STACK, LAYER = LAYERS * ROWS * COLUMNS * 4, ROWS * COLUMNS * 4
W, L, INT = "f32[16,8,128]{2,1,0}", "f32[8,128]{1,0}", "s32[]"
COMPUTATIONS = f"""
%sliced (p0: f32[16,8,128], p1: s32[]) -> f32[8,128] {{
  %p0 = {W} parameter(0)
  %p1 = {INT} parameter(1)
  %z = {INT} constant(0)
  %d = f32[1,8,128]{{2,1,0}} dynamic-slice(%p0, %p1, %z, %z), dynamic_slice_sizes={{1,8,128}}
  ROOT %b = {L} bitcast(%d)
}}

%behind_bitcast (p2: f32[16,8,128], p3: s32[]) -> f32[8,128] {{
  %p2 = {W} parameter(0)
  %p3 = {INT} parameter(1)
  %z2 = {INT} constant(0)
  %b2 = f32[16,1024]{{1,0}} bitcast(%p2)
  %c2 = bf16[16,1024]{{1,0}} convert(%b2)
  %d2 = bf16[1,1024]{{1,0}} dynamic-slice(%c2, %p3, %z2), dynamic_slice_sizes={{1,1024}}
  %e2 = f32[1,1024]{{1,0}} convert(%d2)
  ROOT %r2 = {L} reshape(%e2)
}}

%nested (p4: f32[16,8,128], p5: s32[], p6: f32[8,128]) -> f32[8,128] {{
  %p4 = {W} parameter(0)
  %p5 = {INT} parameter(1)
  %p6 = {L} parameter(2)
  %f4 = {L} fusion(%p4, %p5), kind=kLoop, calls=%sliced
  ROOT %m4 = {L} multiply(%f4, %p6)
}}

%view (p7: f32[16,8,128]) -> f32[16,1024] {{
  %p7 = {W} parameter(0)
  ROOT %b7 = f32[16,1024]{{1,0}} bitcast(%p7)
}}

%nested_view (p8: f32[16,8,128]) -> f32[16,1024] {{
  %p8 = {W} parameter(0)
  %f8 = f32[16,1024]{{1,0}} fusion(%p8), kind=kLoop, calls=%view
  ROOT %n8 = f32[16,1024]{{1,0}} negate(%f8)
}}

%updated (p9: f32[16,8,128], p10: s32[], p11: f32[8,128]) -> f32[16,8,128] {{
  %p9 = {W} parameter(0)
  %p10 = {INT} parameter(1)
  %p11 = {L} parameter(2)
  %z9 = {INT} constant(0)
  %b9 = f32[1,8,128]{{2,1,0}} bitcast(%p11)
  %v9 = f32[16,1,8,128]{{3,2,1,0}} bitcast(%p9)
  %u9 = f32[16,1,8,128]{{3,2,1,0}} dynamic-update-slice(%v9, %b9, %p10, %z9, %z9, %z9)
  ROOT %r9 = {W} bitcast(%u9)
}}

%updated_and_read (p12: f32[16,8,128], p13: s32[], p14: f32[8,128]) -> f32[16,8,128] {{
  %p12 = {W} parameter(0)
  %p13 = {INT} parameter(1)
  %p14 = {L} parameter(2)
  %z12 = {INT} constant(0)
  %b12 = f32[1,8,128]{{2,1,0}} bitcast(%p14)
  %u12 = {W} dynamic-update-slice(%p12, %b12, %p13, %z12, %z12)
  ROOT %r12 = {W} negate(%u12)
}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

%scattered (p15: f32[16,8,128], p16: s32[2,1], p17: f32[2,8,128]) -> f32[16,8,128] {{
  %p15 = {W} parameter(0)
  %p16 = s32[2,1]{{1,0}} parameter(1)
  %p17 = f32[2,8,128]{{2,1,0}} parameter(2)
  ROOT %s15 = {W} scatter(%p15, %p16, %p17), update_window_dims={{1,2}}, to_apply=%add
}}

%two_users (p18: f32[16,8,128], p19: s32[]) -> (f32[8,128], f32[16,8,128]) {{
  %p18 = {W} parameter(0)
  %p19 = {INT} parameter(1)
  %z18 = {INT} constant(0)
  %d18 = f32[1,8,128]{{2,1,0}} dynamic-slice(%p18, %p19, %z18, %z18), dynamic_slice_sizes={{1,8,128}}
  %b18 = {L} bitcast(%d18)
  %n18 = {W} negate(%p18)
  ROOT %t18 = ({L}, {W}) tuple(%b18, %n18)
}}
"""
ENTRY = f"""
ENTRY %main (w: f32[16,8,128], i: s32[], x: f32[8,128], k: s32[2,1], u: f32[2,8,128]) -> f32[] {{
  %w = {W} parameter(0)
  %i = {INT} parameter(1)
  %x = {L} parameter(2)
  %k = s32[2,1]{{1,0}} parameter(3)
  %u = f32[2,8,128]{{2,1,0}} parameter(4)
  %y = f32[8,128]{{1,0:S(1)}} parameter(5)
  %h = f32[16,8,128]{{2,1,0:S(5)}} parameter(6)
  INSTRUCTION
  ROOT %zero = f32[] constant(0)
}}
"""
INDEX = 4
CASES = {
    "a slice": (f"{L} fusion(%w, %i), kind=kLoop, calls=%sliced", LAYER + INDEX + LAYER),
    "a slice into chip memory": ("f32[8,128]{1,0:S(1)} fusion(%w, %i), kind=kLoop, calls=%sliced", LAYER + INDEX),
    "a slice of a conversion of a bitcast": (
        f"{L} fusion(%w, %i), kind=kLoop, calls=%behind_bitcast",
        LAYER + INDEX + LAYER,
    ),
    "a slice in a fusion of the fusion": (
        f"{L} fusion(%w, %i, %x), kind=kOutput, calls=%nested",
        LAYER + INDEX + LAYER + LAYER,
    ),
    "all of it, seen by a fusion of the fusion": (
        "f32[16,1024]{1,0} fusion(%w), kind=kOutput, calls=%nested_view",
        2 * STACK,
    ),
    "an update in place behind bitcasts": (f"{W} fusion(%w, %i, %x), kind=kLoop, calls=%updated", 2 * LAYER + INDEX),
    "an update that is looked at": (
        f"{W} fusion(%w, %i, %x), kind=kLoop, calls=%updated_and_read",
        STACK + INDEX + LAYER + STACK,
    ),
    "a scatter in place": (f"{W} fusion(%w, %k, %u), kind=kCustom, calls=%scattered", 2 * LAYER * 3 + 2 * 4),
    "a slice, and all of it": (
        f"({L}, {W}) fusion(%w, %i), kind=kLoop, calls=%two_users",
        STACK + INDEX + LAYER + STACK,
    ),
    "a scatter by itself": (f"{W} scatter(%w, %k, %u), update_window_dims={{1,2}}, to_apply=%add", 3 * 2 * LAYER),
    "an update by itself": (f"{W} dynamic-update-slice(%w, %x, %i, %i, %i)", 2 * LAYER),
    "an update of host memory": ("f32[16,8,128]{2,1,0:S(5)} dynamic-update-slice(%h, %x, %i, %i, %i)", LAYER),
    "an update from chip memory": (f"{W} dynamic-update-slice(%w, %y, %i, %i, %i)", LAYER),
    "a copy": (f"{W} copy(%w)", 2 * STACK),
    "a copy into chip memory beside other work": (
        "f32[16,8,128]{2,1,0:S(1)} copy-done(%start)",
        STACK,
        "%start = (f32[16,8,128]{2,1,0:S(1)}, f32[16,8,128]{2,1,0}, u32[]) copy-start(%w)",
    ),
    "a slice into chip memory beside other work": (
        "f32[1,8,128]{2,1,0:S(1)} dynamic-slice-done(%start)",
        LAYER,
        "%start = ((f32[16,8,128]{2,1,0}, s32[]), f32[1,8,128]{2,1,0:S(1)}, u32[]) dynamic-slice-start(%w, %i, %i, %i)",
    ),
    "an update of host memory beside other work": (
        "f32[16,8,128]{2,1,0:S(5)} dynamic-update-slice-done(%start)",
        LAYER,
        "%start = ((f32[16,8,128]{2,1,0:S(5)}), f32[16,8,128]{2,1,0:S(5)}, u32[]) "
        "dynamic-update-slice-start(%h, %x, %i, %i, %i)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_one_instruction(case):
    text, expected, *before = CASES[case]
    lines = "\n  ".join([*before, f"%it = {text}"])
    module = parse_module("HloModule m, is_scheduled=true\n" + COMPUTATIONS + ENTRY.replace("INSTRUCTION", lines))
    assert hbm_traffic(module, module.entry, module.entry.by_name["it"]) == expected


def test_the_literal_of_a_parameter_is_not_the_name_of_an_instruction():
    # In the compiler's short form names are numbers, as parameters' literals are.
    text = f"""HloModule m
%f (0: f32[16,8,128]) -> f32[16,8,128] {{
  %0 = {W} parameter(0)
  ROOT %1 = {W} negate(%0)
}}
ENTRY %main (w: f32[16,8,128]) -> f32[16,8,128] {{
  %w = {W} parameter(0)
  ROOT %it = {W} fusion(%w), kind=kLoop, calls=%f
}}
"""
    module = parse_module(text)
    assert hbm_traffic(module, module.entry, module.entry.root) == 2 * STACK
