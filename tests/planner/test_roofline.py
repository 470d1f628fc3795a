"""Seconds by counting: operations under both roofs, collectives as rings that send one message
after the other.
"""

import random
from math import ceil

import pytest

from ppctl.executors.work.roofline import LEAST_DEPTH, Extent, Link, Op, ProductShape, Speed

sizes = pytest.mark.parametrize("size", [1, 2, 3, 4, 8])


def ring_s(link, blocks, is_sum):
    """(seconds, what each device has) of `blocks[device][share]` going round a ring, step by step.

    In each step every device sends one share to the next one. is_sum: the receiver adds it to its
    own, and share d is whole on device d in the end; otherwise device d begins with share d, and
    all have all in the end.
    """
    size, seconds = len(blocks), 0.0
    held = [dict(shares) for shares in blocks]
    for step in range(size - 1):
        sent = [(d, (d - step - is_sum) % size) for d in range(size)]
        messages = [(d, share, held[d][share]) for d, share in sent]
        seconds += max(
            link.latency_s + num_bytes / link.bytes_per_s for num_bytes in [SHARE_BYTES] * size
        )
        for d, share, value in messages:
            there = held[(d + 1) % size]
            there[share] = there[share] + value if is_sum else value
    return seconds, held


SHARE_BYTES = 96.0


@sizes
@pytest.mark.parametrize("link", [Link(0.0, 10.0), Link(0.5, 10.0), Link(0.5, 1e30)])
def test_collectives_take_the_time_of_their_messages_on_a_ring(link, size):
    whole = SHARE_BYTES * size
    gathered_s, held = ring_s(link, [{d: d} for d in range(size)], is_sum=False)
    assert all(shares == {d: d for d in range(size)} for shares in held)
    assert link.gather_s(whole, size) == pytest.approx(gathered_s)
    blocks = [dict.fromkeys(range(size), 10**d) for d in range(size)]
    scattered_s, held = ring_s(link, blocks, is_sum=True)
    assert all(
        shares[d] == sum(10**other for other in range(size)) for d, shares in enumerate(held)
    )
    assert link.gather_s(whole, size) == pytest.approx(scattered_s)
    assert link.sum_s(whole, size) == pytest.approx(
        min(scattered_s + gathered_s, tree_s(link, whole, size))
    )


def tree_s(link, num_bytes, size):
    """Seconds of a sum in pairs, then of pairs, up to one device, and back."""
    seconds = 0.0
    while size > 1:
        seconds += 2 * link.hop_s(num_bytes)
        size = (size + 1) // 2
    return seconds


@sizes
def test_empty_messages_take_their_latency(size):
    link = Link(latency_s=2.0, bytes_per_s=10.0)
    assert link.hop_s(0) == 2.0
    assert link.gather_s(0, size) == 2.0 * (size - 1)
    assert link.sum_s(0, size) == tree_s(link, 0, size) <= 4.0 * (size - 1)


def test_no_collective_is_faster_than_the_bytes_that_a_device_has_to_send():
    link = Link(0.0, 10.0)
    for size in range(2, 40):
        assert link.sum_s(1000.0, size) == pytest.approx(
            2 * 1000.0 * (size - 1) / size / 10.0
        )  # Thakur et al. 2005
        assert link.sum_s(1000.0, size) > link.sum_s(1000.0, size - 1)


def test_an_operation_takes_as_long_as_its_slower_half():
    speed = Speed(flops_per_s=100.0, bytes_per_s=10.0)
    arithmetic, traffic, weights = Op(1000.0, 1.0), Op(10.0, 50.0), Op(10.0, 1.0, fixed_bytes=60.0)
    assert speed.seconds([arithmetic], examples=3) == 30.0
    assert speed.seconds([traffic], examples=3) == 15.0
    assert speed.seconds([weights], examples=3) == pytest.approx(6.3)  # weights are read once
    assert speed.seconds([arithmetic, traffic, weights], examples=3) == pytest.approx(
        51.3
    )  # one after the other
    assert speed.seconds([], examples=3) == 0
    # with more examples the traffic of weights pays off: from 2.0 on this one computes for longer
    dense = Op(40.0, 1.0, fixed_bytes=6.0)
    assert [speed.seconds([dense], examples) for examples in (1, 2, 4)] == [
        pytest.approx(s) for s in (0.7, 0.8, 1.6)
    ]


def test_seconds_lie_between_the_roofs():
    choose = random.Random(0)
    speed = Speed(3e14, 2e12)
    for _ in range(50):
        ops = [
            Op(choose.uniform(0, 1e12), choose.uniform(0, 1e9), choose.uniform(0, 1e9))
            for _ in range(8)
        ]
        examples = choose.randint(1, 16)
        compute_s = sum(examples * op.flops for op in ops) / 3e14
        memory_s = sum(examples * op.bytes + op.fixed_bytes for op in ops) / 2e12
        assert (
            max(compute_s, memory_s) * (1 - 1e-12)
            <= speed.seconds(ops, examples)
            <= compute_s + memory_s
        )


def test_an_operation_is_empty_only_without_flops_and_bytes():
    assert Op(0.0, 0.0).is_nothing
    assert not any(
        op.is_nothing for op in (Op(1.0, 0.0), Op(0.0, 1.0), Op(0.0, 0.0, fixed_bytes=1.0))
    )


# --- shapes of products -------------------------------------------------------------------------


def product(rows, columns, depth, number=1.0):
    return ProductShape(
        *(n if isinstance(n, Extent) else Extent(fixed=n) for n in (rows, columns, depth, number))
    )


# rows, columns, depth, number of products: share of the time of 132 cores, with tiles of 128 x 256
BY_HAND = {
    "two waves of 256 tiles": ((4096, 2048, 2048, 1), 256 / 264),
    "eight waves of 1024 tiles": ((4096, 8192, 2048, 1), 1024 / (8 * 132)),
    "one wave of 132 tiles": ((12 * 128, 11 * 256, 64, 1), 1.0),
    "one tile more": ((1 * 128, 133 * 256, 64, 1), 133 / 264),
    "the other way round": ((256, 128 * 132, 64, 1), 1.0),  # tiles of 256 x 128
    "a batch of 64 products of 4 tiles": ((256, 512, 64, 64), 256 / 264),
    "half a tile": ((64, 256 * 132, 64, 1), 0.5),
    "one row over": ((129, 256 * 66, 64, 1), 129 / 256),
    "44 cores a tile": ((128, 3 * 256, 1024 * LEAST_DEPTH, 1), 1.0),
    "40 cores a tile": ((128, 3 * 256, 40 * LEAST_DEPTH, 1), 120 / 132),
    "too shallow to share": ((128, 3 * 256, LEAST_DEPTH, 1), 3 / 132),
}


@pytest.mark.parametrize(("sizes", "share"), BY_HAND.values(), ids=BY_HAND)
def test_a_product_takes_whole_waves_of_whole_tiles(sizes, share):
    shape, flops = product(*sizes), 2.0 * sizes[0] * sizes[1] * sizes[2] * sizes[3]
    assert shape.efficiency(1, cores=132) == pytest.approx(share)
    speed = Speed(flops_per_s=1e12, bytes_per_s=1e30, cores=132)
    assert speed.seconds([Op(flops, 0.0, shape=shape)], 1) == pytest.approx(flops / 1e12 / share)
    assert Speed(1e12, 1e30).seconds([Op(flops, 0.0, shape=shape)], 1) == pytest.approx(
        flops / 1e12
    )  # no cores given


def test_tiles_are_counted_for_the_whole_microbatch():
    """Not an example's, times the number of examples."""
    shape = product(Extent(each=2048), 2048, 2048)
    for examples, tiles in ((1, 128), (2, 256), (4, 512), (33, 4224)):
        assert shape.efficiency(examples, 132) == pytest.approx(tiles / (ceil(tiles / 132) * 132))


def test_no_product_is_faster_than_all_cores():
    choose = random.Random(1)
    for _ in range(500):
        shape = product(*(choose.randint(1, 5000) for _ in range(3)), choose.randint(1, 70))
        assert 0 < shape.efficiency(1, choose.choice((1, 8, 108, 132))) <= 1


def test_kernels_of_attention_have_separate_speeds():
    forward, backward = (
        Op(100.0, 0.0, kernel="attention_forward"),
        Op(100.0, 0.0, kernel="attention_backward"),
    )
    own = Speed(100.0, 1e30, attention_forward=50.0, attention_backward=25.0, cores=132)
    assert (own.seconds([forward], 1), own.seconds([backward], 1)) == (2.0, 4.0)
    assert Speed(100.0, 1e30, cores=132).seconds([forward, backward], 1) == 2.0  # like products


def test_a_sum_is_a_separate_pass_unless_products_add_to_it():
    bound_by_arithmetic, bound_by_memory = (
        Op(flops, 10.0, fixed_bytes=20.0, sum_bytes=40.0) for flops in (1e4, 1.0)
    )
    apart, together = (
        Speed(flops_per_s=100.0, bytes_per_s=10.0, adds=adds) for adds in (False, True)
    )
    assert (
        apart.seconds([bound_by_arithmetic], 1),
        together.seconds([bound_by_arithmetic], 1),
    ) == (104.0, 100.0)
    assert apart.seconds([bound_by_memory], 1) == together.seconds([bound_by_memory], 1) == 7.0
    assert not Op(0.0, 0.0, sum_bytes=1.0).is_nothing
