"""The operations of a traced program: FLOPs and memory traffic.

A matrix product counts its FLOPs, and its operands and results as traffic. Compilers fuse
element-wise operations into their readers, so other operations count only their writes to memory,
and reductions also count their reads. A result is written if a matrix product reads it, if the
program returns it, or if a scatter makes it. A written result counts twice: its write, and the read
of an input of equal size. Reductions of the same values at the same `Program.depth` share one read.
Views, such as reshapes and transposes, have no traffic. An element-wise operation or reduction that
occurs twice, such as the rounding of an activation for several matrices, counts once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax.extend import core

from ppctl.executors.stage.jaxpr_flops import PALLAS, PRODUCTS, equation_flops, num_groups_of
from ppctl.executors.stage.jaxpr_tools import (
    ADDITIONS,
    carry_place,
    demand,
    extents,
    flatten,
    has_effects,
    is_literal,
    is_scan,
)
from ppctl.executors.work.roofline import Collective, Extent, Kernel, Op, ProductShape
from ppctl.model.attention import cudnn_attention
from ppctl.model.experts import counted_products

Tree = Any
SPLASH = "splash_"  # prefix of JAX's Pallas kernels of attention, such as splash_mha_fwd
SHAPES = ("reshape", "squeeze", "expand_dims", "transpose")
VIEWS = (*SHAPES, "name", "reduce_precision", "copy", "optimization_barrier")
REDUCED = ("sum", "max", "min", "prod", "and", "or")
REDUCTIONS = (*(f"reduce_{name}" for name in REDUCED), "argmax", "argmin")
SCATTER = "scatter"  # prefix of operations that copy a whole array, then overwrite some places
COLLECTIVES: dict[str, Collective] = {
    **dict.fromkeys(("all_gather", "reduce_scatter"), "gather"),
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax"), "sum"),
    "all_to_all": "exchange",
    "ppermute": "hop",
}
EXPENSIVE = ("tanh", "exp", "log", "erf", "logistic", "sin", "cos", "pow", "log1p", "expm1")


def ops_of(function: Callable, *args: Tree, only_needed: bool = False) -> list[Op]:
    """Return the operations of function(*args) in order; args: arrays or their shapes.

    only_needed: leave out operations that no result depends on.
    """
    jaxpr = flatten(jax.make_jaxpr(function)(*args)).jaxpr
    needed, _ = demand(jaxpr, [True] * len(jaxpr.outvars))
    eqns = [eqn for i, eqn in enumerate(jaxpr.eqns) if i in needed or not only_needed]
    return Program(eqns, jaxpr.outvars).ops()


def peak_bytes(function: Callable, *args: Tree) -> int:
    """Return the peak bytes of live values in memory, without arguments and in-place sums."""
    jaxpr = flatten(jax.make_jaxpr(function)(*args)).jaxpr
    return Program(jaxpr.eqns, jaxpr.outvars).peak_bytes()


def bytes_to_make(function: Callable, *args: Tree) -> int:
    """Return the bytes of residuals that suffice to recompute the results of function(*args).

    Compilers recompute element-wise results where they are read, except expensive ones
    (EXPENSIVE). The first argument, the weights, does not count.
    """
    jaxpr = flatten(jax.make_jaxpr(function)(*args)).jaxpr
    program = Program(jaxpr.eqns, (), kept=EXPENSIVE)
    residuals: dict[int, Any] = {}
    for v in jaxpr.outvars:
        residuals |= {} if is_literal(v) else program.sources(v)
    weights = {id(v) for v in jaxpr.invars[: len(jax.tree.leaves(args[0]))]}
    return sum(_size(v) for key, v in residuals.items() if key not in weights)


class Program:
    """The equations of a program, and which of its values are in memory."""

    def __init__(
        self, eqns: Sequence[core.JaxprEqn], results: Sequence[Any], kept: Sequence[str] = ()
    ):
        self.kept = kept  # primitives whose results stay in memory
        self.eqns, self.same = _without_repeats(eqns)
        self.maker = {id(v): eqn for eqn in self.eqns for v in eqn.outvars}
        self.returned = {id(self.root(v)) for v in results if not is_literal(v)}
        written, self.readers = list[Any](), dict[int, list[core.JaxprEqn]]()
        for eqn in self.eqns:
            written += eqn.invars if _is_product(eqn) else ()
            written += eqn.outvars if eqn.primitive.name.startswith(SCATTER) else ()
            for v in eqn.invars:
                self.readers.setdefault(id(v), []).append(eqn)
        self.written = self.returned | {id(self.root(v)) for v in written if not is_literal(v)}

    def root(self, v: Any) -> Any:
        """Return the value that v is a view of; v itself if it is not a view."""
        v = v if is_literal(v) else self.same.get(v, v)
        eqn = None if is_literal(v) else self.maker.get(id(v))
        while eqn is not None and eqn.primitive.name in VIEWS:
            v = eqn.invars[eqn.outvars.index(v)]
            eqn = None if is_literal(v) else self.maker.get(id(v))
        return v

    def ops(self) -> list[Op]:
        found, passes = list[Op](), set[tuple]()
        for eqn in self.eqns:
            name = eqn.primitive.name
            if name in COLLECTIVES:
                found += _sent(eqn)
            elif _is_product(eqn):
                found.append(self.product(eqn))
            elif is_scan(eqn):  # iterations run one after the other
                body = eqn.params["jaxpr"].jaxpr
                inner = Program(body.eqns, body.outvars).ops()
                found += [_times(eqn.params["length"], op) for op in inner]
            elif name in REDUCTIONS:
                found.append(Op(0.0, self.read_bytes(eqn, passes) + self.made_bytes(eqn)))
            else:
                found.append(Op(0.0, self.made_bytes(eqn)))
        return found

    def product(self, eqn: core.JaxprEqn) -> Op:
        traffic = sum(map(_traffic(eqn), (*eqn.invars, *eqn.outvars)))
        flops, shape, sum_bytes = equation_flops(eqn), _product_shape(eqn), self.added_bytes(eqn)
        # attention speeds come from causal kernels, which run only half of the counted FLOPs;
        # kernels without a mask run all of them, so their FLOPs count twice
        flops *= 2.0 if cudnn_attention.is_unmasked(eqn.params) else 1.0
        return Op(flops, traffic, kernel=_kernel(eqn), shape=shape, sum_bytes=sum_bytes)

    def made_bytes(self, eqn: core.JaxprEqn) -> float:
        """Return the bytes of traffic of an equation's written results."""
        if eqn.primitive.name in VIEWS or self.is_added_by_product(eqn):
            return 0.0
        return 2.0 * sum(_size(v) for v in eqn.outvars if id(v) in self.written)

    def read_bytes(self, eqn: core.JaxprEqn, passes: set[tuple]) -> float:
        """Return the bytes that a reduction reads; 0 if `passes` already has this read.

        Adds the read to `passes`.
        """
        operand: Any = eqn.invars[0]
        least_axes = min(2, operand.aval.ndim)  # vectors, such as a norm's scale, do not count
        large = {key: v for key, v in self.sources(operand).items() if v.aval.ndim >= least_axes}
        key = (self.depth(operand), *sorted(large))
        if key in passes:
            return 0.0
        passes.add(key)
        return float(sum(map(_size, large.values())))

    def is_in_memory(self, v: Any) -> bool:
        eqn = self.maker.get(id(v))
        if eqn is None or id(v) in self.written or _is_product(eqn) or is_scan(eqn):
            return True
        return eqn.primitive.name in (*REDUCTIONS, *COLLECTIVES, *self.kept)

    def peak_bytes(self) -> int:
        made = {
            id(self.root(v)): (i, v)
            for i, eqn in enumerate(self.eqns)
            for v in eqn.outvars
            if self.is_in_memory(v) and not self.is_sum(eqn, v)
        }
        last = {key: len(self.eqns) if key in self.returned else i for key, (i, _) in made.items()}
        for i, eqn in enumerate(self.eqns):
            read = {key for v in eqn.invars for key in self.sources(v)}
            last |= {key: max(last[key], i) for key in read & last.keys()}
        lives = [(i, last[key], _size(v)) for key, (i, v) in made.items()]

        def live(t: int) -> int:
            eqn = self.eqns[t]
            if not is_scan(eqn):
                return sum(size for first, end, size in lives if first <= t <= end)
            body = eqn.params["jaxpr"].jaxpr
            # the body's peak includes one iteration's results; a loop's results are added to it
            is_loop = eqn.params["length"] > 1
            around = sum(size for first, end, size in lives if first < t + is_loop and t <= end)
            return around + Program(body.eqns, body.outvars).peak_bytes()

        return max(map(live, range(len(self.eqns))), default=0)

    def sources(self, v: Any) -> dict[int, Any]:
        """Return the values in memory that v is computed from, by id."""
        found, seen, open_ = dict[int, Any](), set[int](), [v]
        while open_:
            v = self.root(open_.pop())
            if is_literal(v) or id(v) in seen:
                continue
            seen.add(id(v))
            if self.is_in_memory(v):
                found[id(v)] = v
            else:
                open_ += self.maker[id(v)].invars
        return found

    def depth(self, v: Any) -> int:
        """Return the length of the longest chain of reductions that leads to v."""
        makers = [self.maker.get(id(source)) for source in self.sources(v).values()]
        reductions = [eqn for eqn in makers if eqn is not None and eqn.primitive.name in REDUCTIONS]
        return max((1 + self.depth(eqn.invars[0]) for eqn in reductions), default=0)

    def added_bytes(self, product: core.JaxprEqn) -> float:
        """Return the bytes of traffic to add a product to its sum; 0 if it has another reader."""
        v = product.outvars[0]
        while len(readers := self.readers.get(id(v), [])) == 1:
            (eqn,) = readers
            if self.is_added_by_product(eqn):
                return 2.0 * _size(eqn.outvars[0])
            if eqn.primitive.name not in (*VIEWS, "convert_element_type"):
                break
            v = eqn.outvars[0]
        return 0.0

    def is_added_by_product(self, eqn: core.JaxprEqn) -> bool:
        """Return whether eqn makes a result: an argument plus a product without other readers."""
        if eqn.primitive.name not in ADDITIONS or id(eqn.outvars[0]) not in self.returned:
            return False
        ways = eqn.invars, eqn.invars[::-1]
        return any(self.is_given(total) and self.is_product_alone(addend) for total, addend in ways)

    def is_sum(self, eqn: core.JaxprEqn, v: Any) -> bool:
        """Return whether v is a returned sum of an argument and other values, made in place."""
        if id(v) not in self.returned:
            return False
        if not is_scan(eqn):
            return eqn.primitive.name in ADDITIONS and any(map(self.is_given, eqn.invars))
        is_carry = eqn.outvars.index(v) < extents(eqn)[1]
        return is_carry and self.is_given(eqn.invars[carry_place(eqn, v)])

    def is_given(self, v: Any) -> bool:
        """Return whether v is an argument of the program."""
        return not is_literal(v) and id(self.root(v)) not in self.maker

    def is_product_alone(self, v: Any) -> bool:
        """Return whether v is a product (perhaps cast or transposed) that is read nowhere else."""
        while not is_literal(v) and len(self.readers[id(v)]) == 1 and id(v) not in self.returned:
            eqn = self.maker.get(id(v))
            if eqn is None or eqn.primitive.name in PRODUCTS:
                return eqn is not None
            if eqn.primitive.name not in (*VIEWS, "convert_element_type"):
                return False
            v = eqn.invars[0]
        return False


def _without_repeats(eqns: Sequence[core.JaxprEqn]) -> tuple[list[core.JaxprEqn], dict[Any, Any]]:
    """Return (equations without repeats, {a repeated result: the first equal result}).

    Compilers compute equal results once. Loops, products and collectives are not compared.
    """
    kept, same, first = list[core.JaxprEqn](), dict[Any, Any](), dict[Any, core.JaxprEqn]()
    for given in eqns:
        reads = [v if is_literal(v) else same.get(v, v) for v in given.invars]
        eqn = given.replace(invars=reads) if same else given
        name = eqn.primitive.name
        if not (_is_product(eqn) or is_scan(eqn) or name in COLLECTIVES or has_effects(eqn)):
            operands = (repr(v) if is_literal(v) else v for v in reads)
            before = first.setdefault((name, repr(eqn.params), *operands), eqn)
            if before is not eqn:
                same |= dict(zip(eqn.outvars, before.outvars, strict=True))
                continue
        kept.append(eqn)
    return kept, same


def _times(length: int, op: Op) -> Op:
    """Return the operation with its FLOPs, bytes and sends over `length` iterations of a scan."""
    sizes = {name: length * getattr(op, name) for name in ("flops", "bytes", "sum_bytes")}
    return replace(op, **sizes, times=Extent(fixed=length * op.times.fixed))


def _sent(eqn: core.JaxprEqn) -> list[Op]:
    """Return an Op for each array of a collective, with the bytes of the undivided array."""
    names = eqn.params.get("axis_name", eqn.params.get("axes"))
    axes = tuple(map(str, names)) if isinstance(names, tuple) else (str(names),)
    kind, is_gather = COLLECTIVES[eqn.primitive.name], eqn.primitive.name == "all_gather"
    arrays = eqn.outvars if is_gather else eqn.invars
    return [Op(0.0, _size(v), axes=axes, collective=kind) for v in arrays]


def _is_product(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation is a product or attention kernel, which compilers do not fuse."""
    is_cudnn = eqn.params.get("target_name") in cudnn_attention.CALLS
    is_call = is_cudnn or counted_products.is_counted(eqn)
    return is_call or eqn.primitive.name in (*PRODUCTS, PALLAS)


def _traffic(eqn: core.JaxprEqn) -> Callable[[Any], float]:
    """Return a function from a product's operand or result to its bytes read or written."""
    if not counted_products.is_counted(eqn):
        return _size
    rows: Any = eqn.invars[0]
    share = counted_products.num_rows_of(eqn) / rows.aval.shape[0]
    # weights (3 dims) count whole; of the rows (2 dims), only the share that the product computes
    return lambda v: _size(v) * (1.0 if v.aval.ndim == 3 else share)


def _kernel(eqn: core.JaxprEqn) -> Kernel:
    call = eqn.params.get("target_name")
    if call in cudnn_attention.CALLS:
        return "attention_forward" if call == cudnn_attention.FORWARD else "attention_backward"
    if counted_products.is_counted(eqn):
        return "experts"
    name = str(eqn.params["name"]) if eqn.primitive.name == PALLAS else ""
    if name.startswith(SPLASH):
        return "attention_forward" if "_fwd" in name else "attention_backward"
    operand: Any = eqn.invars[0]
    is_fp8 = eqn.primitive.name == "dot_general" and operand.aval.dtype.itemsize == 1
    return "fp8" if is_fp8 else "product"


def _product_shape(eqn: core.JaxprEqn) -> ProductShape | None:
    """Return the shape of a matrix product; None for other operations.

    A convolution is a product whose rows are all positions, and whose columns are the features.
    """
    if counted_products.is_counted(eqn):
        return ProductShape(*(Extent(fixed=size) for size in counted_products.shape_of(eqn)))
    if eqn.primitive.name not in PRODUCTS:
        return None
    out = prod(eqn.outvars[0].aval.shape)  # pyright: ignore[reportAttributeAccessIssue]
    left, right = (v.aval.shape for v in eqn.invars[:2])  # pyright: ignore[reportAttributeAccessIssue]
    number = 1
    if eqn.primitive.name == "dot_general":
        (_, contracted), (batch, right_batch) = eqn.params["dimension_numbers"]
        number = prod(left[dim] for dim in batch)
        taken = {*contracted, *right_batch}
        columns = prod(size for dim, size in enumerate(right) if dim not in taken)
    elif eqn.primitive.name == "ragged_dot_general":  # groups of equal size
        number, columns = num_groups_of(eqn), eqn.outvars[0].aval.shape[-1]  # pyright: ignore[reportAttributeAccessIssue]
    else:
        columns = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    rows = out // max(1, columns * number)
    depth = equation_flops(eqn) / max(1, 2 * out)
    return ProductShape(*(Extent(fixed=float(size)) for size in (rows, columns, depth, number)))


def _size(v: Any) -> int:
    return prod(v.aval.shape) * v.aval.dtype.itemsize
