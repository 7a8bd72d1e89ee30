"""The searches for faults of compilers: buffers that a pipelined loop overwrites, and addresses of shared memory."""

from lab.campaigns.addresses import judged
from lab.campaigns.buffers import overwritten_buffers

LOOP = """
  %tiles = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x64xbf16>
  %first = ttg.memdesc_index %tiles
  %a = ttg.async_copy_global_to_local %pointers, %first
  %second = ttg.memdesc_index %tiles
  %b = ttg.async_copy_global_to_local %pointers, %second
  %found = scf.for %step = %zero to %end {{
    %own = ttg.memdesc_index %tiles
    %product = ttng.warp_group_dot %other, %own, %sum
    %waited = ttng.warp_group_dot_wait %product {{pendings = {pendings} : i32}}
    %next = ttg.memdesc_index %tiles
    %c = ttg.async_copy_global_to_local %pointers, %next
  }}
"""


def test_products_in_flight_need_one_buffer_more_than_copies_ahead() -> None:
    for buffers, pendings, wrong in ((2, 1, ["%tiles of 2"]), (3, 1, []), (2, 0, [])):
        assert overwritten_buffers(LOOP.format(buffers=buffers, pendings=pendings)) == wrong


PTX = """.reqntid 64
  and.b32 %r1, %tid.x, 56;
  shl.b32 %r2, %r1, 1;
  xor.b32 %r3, %tid.x, %r2;
  st.shared.b32 [%r3+4096], %r9;
"""
CODE = """
  S2R R1, SR_TID.X ;
  LOP3.LUT R3, R1, 0x38, RZ, 0xc0, !PT ;
  LEA {}, R3, R1, 0x7 ;
  IMAD.SHL.U32 R4, R3.reuse, 0x2, RZ ;
  LOP3.LUT R4, R4, R1, RZ, 0x3c, !PT ;
  STS [R4+0x1000], R9 ;
"""


def test_register_overwritten_before_it_is_read_makes_another_address() -> None:
    assert judged(PTX, CODE.format("R14")) == ([], 1, 1)
    assert judged(PTX, CODE.format("R3")).wrong[0] == "STS [R4+0x1000], R9"
