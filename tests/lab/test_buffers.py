"""The searches for faults of compilers: buffers that a pipelined loop overwrites, and addresses of shared memory."""

import pytest

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


PTX = """
.visible .entry kernel() .reqntid 64, 1, 1 {
	mov.u32 %r1, %tid.x;
	mov.b32 %r2, global_smem;
	mov.b32 %r9, 0;
	and.b32 %r3, %r1, 56;
	shl.b32 %r4, %r3, 1;
	xor.b32 %r5, %r1, %r4;
	add.s32 %r6, %r2, %r5;
$L__BB0_1:
	shl.b32 %r8, %r9, 10;
	add.s32 %r7, %r6, %r8;
	st.shared.v4.b32 [%r6+4096], {%r1, %r1, %r1, %r1};
	st.shared.b32 [%r7], %r1;
	add.s32 %r9, %r9, 1;
	setp.lt.s32 %p1, %r9, 4;
	@%p1 bra $L__BB0_1;
	ret;
}
"""
CODE = """
        /*0000*/                   S2R R1, SR_TID.X ;
        /*0010*/                   S2UR UR4, SR_CgaCtaId ;
        /*0020*/                   UMOV UR5, 0x400 ;
        /*0030*/                   IMAD.MOV.U32 R9, RZ, RZ, RZ ;
        /*0040*/                   ULEA UR4, UR4, UR5, 0x18 ;
        /*0050*/                   LOP3.LUT R3, R1, 0x38, RZ, 0xc0, !PT ;
        /*0060*/                   {between} ;
        /*0070*/                   IMAD.SHL.U32 R4, R3.reuse, 0x2, RZ ;
        /*0080*/                   LOP3.LUT R4, R4, R1, RZ, 0x3c, !PT ;
.L_x_0:
        /*0090*/                   LEA R5, R9, R4, 0xa ;
        /*00a0*/                   STS.128 [R4+UR4+0x1000], R8 ;
        /*00b0*/                   VIADD R9, R9, 0x1 ;
        /*00c0*/                   STS [R5+UR4], R1 ;
        /*00d0*/                   ISETP.GE.AND P0, PT, R9, 0x4, PT ;
        /*00e0*/              @!P0 BRA `(.L_x_0) ;
        /*00f0*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("between", "is_right"),
    [("LEA R14, R3, R1, 0x7", True), ("LEA R3, R3, R1, 0x7", False)],
    ids=["right", "register overwritten before it is read"],
)
def test_addresses_of_machine_code_are_those_of_the_ptx(between: str, is_right: bool) -> None:
    # the second store's address goes up by a number for all threads at once
    found = judged(PTX, CODE.format(between=between))
    assert found[1:] == (2, 2)
    assert found.wrong[:2] == ([] if is_right else ["STS.128 [R4+UR4+0x1000], R8", "STS [R5+UR4], R1"])
