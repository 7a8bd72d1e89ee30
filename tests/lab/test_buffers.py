"""The search for buffers that a pipelined loop overwrites, on a loop as Triton prints it."""

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
