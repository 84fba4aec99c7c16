"""Device functions that the kernels share: blocks of a gradient, their codes and their errors.

A program handles a tile of ROWS blocks. One tile is CHUNKS tensors `[ROWS, CHUNK]`, CHUNK =
BLOCK // CHUNKS, in the order in which they are packed: with PLANES = 8 // BITS, chunks 0 ..
PLANES - 1 share bytes, then chunks PLANES .. 2 * PLANES - 1, and so on (`element_of`). Packing is
thus elementwise between chunks: no data moves between threads. The host chooses CHUNK such that a
thread owns one 16-byte vector of each chunk, in all 32 elements of one block (`launch.py`).

Arithmetic is float32 from the load on and rounds like eager PyTorch, operation by operation: the
kernels are compiled without contraction of a * b + c, and `tl.fma` marks where one rounding is
meant. Subnormals are kept.
"""

import triton
import triton.language as tl

# Adding 1.5 * 2**23 to a float32 below 2**22 in magnitude rounds it half to even and leaves the
# integer, in two's complement, in the low bits of the sum: no conversion to an integer is needed,
# and so none can be out of range.
ROUND_TO_INTEGER = tl.constexpr(12582912.0)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)

# Four-level Lloyd-Max quantizer of a unit Gaussian (Max, 1960, table I).
SMALL_LEVEL = tl.constexpr(0.4528)
LARGE_LEVEL = tl.constexpr(1.510)
THRESHOLD = tl.constexpr(0.9816)

UNROLL_PEERS = tl.constexpr(4)

# Triton's interpreter truncates where hardware rounds float32 to bfloat16.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def to_float32(x):
    if x.dtype == tl.bfloat16:
        # By its bits: the interpreter loses subnormals in this conversion.
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 to `dtype`, half to even."""
    if dtype == tl.bfloat16 and INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def locate_blocks(
    starts_ptr,
    lengths_ptr,
    row_starts_ptr,
    num_blocks,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Index, number in its row of the wire, existence, first element and number of elements of the
    blocks of this program.

    SPLIT: the second program id is a row of the wire, which holds some of the blocks only.
    """
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if SPLIT:
        row = tl.program_id(1).to(tl.int64)
        first = tl.load(row_starts_ptr + row)
        block = first + number
        exists = block < tl.load(row_starts_ptr + row + 1)
    else:
        block = number
        exists = block < num_blocks
    start = tl.load(starts_ptr + block, mask=exists, other=0)
    length = tl.load(lengths_ptr + block, mask=exists, other=0).to(tl.int32)
    if ALIGNED:
        # What lets the compiler load and store 16 bytes at once, masks included.
        start = tl.multiple_of(start, 8)
        length = tl.multiple_of(length, 8)
    return block, number, exists, start, length


@triton.jit
def element_of(chunk: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Elements of the block, `[1, CHUNK]` int32, that a chunk holds."""
    PLANES: tl.constexpr = 8 // BITS
    CHUNK: tl.constexpr = BLOCK // CHUNKS
    first: tl.constexpr = chunk % PLANES * (BLOCK // PLANES) + chunk // PLANES * CHUNK
    return first + tl.arange(0, CHUNK)[None, :]


@triton.jit
def largest_bits(chunks, CHUNKS: tl.constexpr):
    """Bits of max|x| of each block: NaN if there is one, which is above infinity as an integer."""
    largest = tl.abs(chunks[0])
    for c in tl.static_range(1, CHUNKS):
        largest = tl.maximum(largest, tl.abs(chunks[c]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(bits_of(largest) & MAGNITUDE_BITS, axis=1)


@triton.jit
def sum_of_squares(chunks, CHUNKS: tl.constexpr):
    total = chunks[0] * chunks[0]
    for c in tl.static_range(1, CHUNKS):
        total = tl.fma(chunks[c], chunks[c], total)
    return tl.sum(total, axis=1)


@triton.jit
def power_of_two(exponent):
    """2**exponent and its inverse as float32, for exponents in -126..127."""
    biased = exponent + 127
    # The inverse of 2**127 is subnormal.
    inverse = tl.maximum((254 - biased) << 23, 1 << 22)
    return (biased << 23).to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def block_scales(h, length, BITS: tl.constexpr, CHUNKS: tl.constexpr):
    """Scale of each block, 0 where nothing can be sent, and whether the block is finite."""
    absmax_bits = largest_bits(h, CHUNKS)
    if BITS >= 4:
        largest_level: tl.constexpr = 2.0 ** (BITS - 1) - 1.0
        scale = tl.div_rn(absmax_bits.to(tl.float32, bitcast=True), largest_level)
    else:
        # Squares would leave the range of float32: bring the block near 1 by a power of two first.
        exponent = tl.minimum(tl.maximum((absmax_bits >> 23) - 127, -126), 127)
        unit, per_unit = power_of_two(exponent)
        near_one = ()
        for c in tl.static_range(CHUNKS):
            near_one = near_one + (h[c] * per_unit[:, None],)
        numel = tl.maximum(length, 1).to(tl.float32)
        if BITS == 2:
            largest_level: tl.constexpr = LARGE_LEVEL
            scale = tl.sqrt_rn(tl.div_rn(sum_of_squares(near_one, CHUNKS), numel)) * unit
        else:
            largest_level: tl.constexpr = 1.0
            total = tl.abs(near_one[0])
            for c in tl.static_range(1, CHUNKS):
                total += tl.abs(near_one[c])
            scale = tl.div_rn(tl.sum(total, axis=1), numel) * unit
    scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)
    largest_sent = bits_of(scale * largest_level) & MAGNITUDE_BITS
    return scale, (absmax_bits < INFINITY_BITS) & (largest_sent < INFINITY_BITS)


@triton.jit
def quantize_and_pack(
    h,
    scale,  # 0 where nothing is sent
    length,
    code_pointer,  # of the first byte of each block, [ROWS, 1]
    exists,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store the codes of finite `h`; returns what they leave of it, 0 in padding."""
    PLANES: tl.constexpr = 8 // BITS
    scale = scale[:, None]
    sent = scale > 0
    if BITS >= 4:
        # h / scale, exactly rounded, by one division per block: the remainder of a product with
        # the reciprocal is exact in one fma, unless it is subnormal. So lift small blocks.
        lift = tl.where(scale < 2.0**-64, 2.0**64, 1.0)
        divisor = scale * lift
        per_divisor = tl.where(sent, tl.div_rn(1.0, tl.where(sent, divisor, 1.0)), 0.0)
        code_mask: tl.constexpr = 2**BITS - 1
    else:
        code_mask = tl.where(sent, 2**BITS - 1, 0)
        threshold = scale * THRESHOLD
        large = scale * LARGE_LEVEL if BITS == 2 else scale
        small = scale * SMALL_LEVEL
    residual = ()
    packed = 0
    for c in tl.static_range(CHUNKS):
        if BITS >= 4:
            x = h[c] * lift
            quotient = x * per_divisor
            quotient = tl.fma(tl.fma(-quotient, divisor, x), per_divisor, quotient)
            # No clamp: |h| <= max|h|, whose quotient is the largest level but for two roundings.
            rounded = quotient + ROUND_TO_INTEGER
            code = bits_of(rounded)
            left = h[c] - (rounded - ROUND_TO_INTEGER) * scale
        else:
            sign = bits_of(h[c] + 0.0) >> 31  # -1 for negative numbers, 0 for -0.0 and others
            code = sign
            value = large
            if BITS == 2:
                is_large = tl.abs(h[c]) > threshold
                code = code ^ is_large.to(tl.int32)
                value = tl.where(is_large, large, small)
            left = h[c] - (bits_of(value) ^ (sign << 31)).to(tl.float32, bitcast=True)
            # No code stands for the zeros of the padding.
            element = element_of(c, BITS, BLOCK, CHUNKS)
            left = tl.where(element < length[:, None], left, 0.0)
        residual = residual + (left,)
        code = (code & code_mask) << (c % PLANES * BITS)
        packed = code if c % PLANES == 0 else packed | code
        if c % PLANES == PLANES - 1:
            byte = element_of(c - c % PLANES, BITS, BLOCK, CHUNKS)
            tl.store(code_pointer + byte, packed.to(tl.uint8), mask=exists[:, None])
    return residual


@triton.jit
def levels_of(packed, plane: tl.constexpr, BITS: tl.constexpr):
    """Level, float32, of the codes of one plane of bytes, given as int32."""
    SHIFT: tl.constexpr = plane * BITS
    if BITS >= 4:
        # 2**(23 - SHIFT) + n has n in the bits from SHIFT on: no shift, no conversion. Flipping
        # the sign bit of a code in two's complement adds HALF to it.
        HALF: tl.constexpr = 2 ** (BITS - 1)
        MASK: tl.constexpr = (2**BITS - 1) << SHIFT
        FLIP: tl.constexpr = (HALF << SHIFT) | ((127 + 23 - SHIFT) << 23)
        biased = ((packed & MASK) ^ FLIP).to(tl.float32, bitcast=True)
        return biased - (2.0 ** (23 - SHIFT) + HALF)
    elif BITS == 2:
        # Codes 0, 1 and -1, -2: small and large, of either sign.
        field = packed >> SHIFT
        magnitude = tl.where(((field ^ (field >> 1)) & 1) != 0, LARGE_LEVEL, SMALL_LEVEL)
        return tl.where((field & 2) != 0, -magnitude, magnitude)
    else:
        return tl.where((packed & (1 << SHIFT)) != 0, -1.0, 1.0)


@triton.jit
def sum_peers(
    wire_ptr,
    scales_ptr,
    wire_stride,
    first_row,
    peers,
    number,  # of each block in its row of the wire
    exists,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Sum of a tile over rows of the wire, one a peer, from 0.0 and in the order of their ranks."""
    PLANES: tl.constexpr = 8 // BITS
    total = ()
    for _ in tl.static_range(CHUNKS):
        total = total + (tl.zeros([ROWS, BLOCK // CHUNKS], tl.float32),)
    code = number[:, None] * (BLOCK * BITS // 8)
    # Unrolled so that the bytes of several peers are on their way at once.
    for peer in tl.range(0, peers, loop_unroll_factor=UNROLL_PEERS):
        wire = tl.multiple_of((first_row + tl.cast(peer, tl.int64)) * wire_stride, 16)
        scale = tl.load(scales_ptr + wire // 4 + number, mask=exists, other=0.0)[:, None]
        added = ()
        for c in tl.static_range(CHUNKS):
            if c % PLANES == 0:
                byte = element_of(c, BITS, BLOCK, CHUNKS)
                packed = tl.load(wire_ptr + wire + code + byte, mask=exists[:, None], other=0)
                packed = packed.to(tl.int32)
            added = added + (total[c] + levels_of(packed, c % PLANES, BITS) * scale,)
        total = added
    return total


@triton.jit
def load_payload(pointer, exists, ERROR: tl.constexpr):
    """Stored payload in float32."""
    payload = tl.load(pointer, mask=exists, other=0)
    if ERROR == "float8_e4m3":
        # Its exponent and digits, moved to the place they have in float32, are off by 2**120
        # alone, subnormals included. The type itself is not native everywhere.
        bits = ((payload.to(tl.int32) & 0x7F) << 20) | ((payload.to(tl.int32) & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * 2.0**120
    else:
        return to_float32(payload)


@triton.jit
def store_payload(pointer, x, exists, ERROR: tl.constexpr):
    """Round float32 to the payload's dtype, half to even."""
    if ERROR == "float8_e4m3":
        # One digit of x is 2**(exponent - 3), or 2**-9 for subnormals: round by adding 1.5 * 2**23
        # of them. |x| < 256, so nothing overflows.
        exponent = tl.maximum(bits_of(x) & INFINITY_BITS, 121 << 23)
        shift = (exponent + ((20 << 23) | (1 << 22))).to(tl.float32, bitcast=True)
        bits = bits_of(((x + shift) - shift) * 2.0**-120)
        # The sum has lost the sign of a zero.
        payload = ((bits >> 20) & 0x7F) | ((bits_of(x) >> 24) & 0x80)
        tl.store(pointer, payload.to(tl.uint8), mask=exists)
    elif ERROR == "int8":
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        tl.store(pointer, bits_of(x + ROUND_TO_INTEGER).to(tl.int8), mask=exists)
    else:
        tl.store(pointer, round_to(x, pointer.dtype.element_ty), mask=exists)


@triton.jit
def store_error(
    error,
    pointer,  # of the first element of each row of the payload, [ROWS, 1]
    scale_pointer,
    exists,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ERROR: tl.constexpr,
):
    """Block-scaled form of an error."""
    # The largest payload of a block lies in [2**TOP, 2**(TOP + 1)): high in the range of its
    # dtype, so that small elements keep their digits, and below its largest value.
    if ERROR == "float16":
        TOP: tl.constexpr = 14
    elif ERROR == "int8":
        TOP: tl.constexpr = 6
    elif ERROR == "float8_e4m3":
        TOP: tl.constexpr = 7
    else:
        TOP: tl.constexpr = 0
    exponent = (largest_bits(error, CHUNKS) >> 23) - (127 + TOP)
    scale, per_scale = power_of_two(tl.maximum(exponent, -126))
    for c in tl.static_range(CHUNKS):
        element = element_of(c, BITS, BLOCK, CHUNKS)
        store_payload(pointer + element, error[c] * per_scale[:, None], exists[:, None], ERROR)
    tl.store(scale_pointer, scale, mask=exists)


@triton.jit
def encode_blocks(
    h,  # CHUNKS tensors [ROWS, CHUNK] float32: the gradient, 0 beyond each block's length
    peer,
    block,
    wire_row,
    number,  # of each block in that row
    exists,
    length,
    wire_ptr,
    scales_ptr,
    wire_stride,
    rows_ptr,
    payload_ptr,
    error_scale_ptr,
    num_rows,
    num_blocks,
    beta,
    one_minus_beta,
    squares_ptr,
    nonfinite_ptr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ERROR: tl.constexpr,
):
    """Compensate, quantize and pack a tile of one peer, and update its error."""
    if ERROR != "none":
        row = peer * num_rows + tl.load(rows_ptr + block, mask=exists, other=0)
        payload_pointer = payload_ptr + row[:, None] * BLOCK
        error_scale = tl.load(error_scale_ptr + row, mask=exists, other=0.0)[:, None]
        old = ()
        compensated = ()
        for c in tl.static_range(CHUNKS):
            element = element_of(c, BITS, BLOCK, CHUNKS)
            payload = load_payload(payload_pointer + element, exists[:, None], ERROR)
            old = old + (payload * error_scale,)
            compensated = compensated + (h[c] + old[c],)
        h = compensated

    scale, finite = block_scales(h, length, BITS, CHUNKS)
    cleared = ()
    for c in tl.static_range(CHUNKS):
        cleared = cleared + (tl.where(finite[:, None], h[c], 0.0),)
    h = cleared
    square_pointer = squares_ptr + (peer * num_blocks + block) * 2
    tl.store(square_pointer, sum_of_squares(h, CHUNKS), mask=exists)
    one = tl.full([block.shape[0]], 1, tl.int64)
    counter = nonfinite_ptr + tl.zeros([block.shape[0]], tl.int64)
    tl.atomic_add(counter, one, mask=exists & (finite == 0), sem="relaxed")

    wire = tl.multiple_of(wire_row * wire_stride, 16)
    tl.store(scales_ptr + wire // 4 + number, tl.where(finite, scale, float("nan")), mask=exists)
    code_pointer = wire_ptr + wire + number[:, None] * (BLOCK * BITS // 8)
    sent_scale = tl.where(finite, scale, 0.0)
    residual = quantize_and_pack(h, sent_scale, length, code_pointer, exists, BITS, BLOCK, CHUNKS)
    tl.store(square_pointer + 1, sum_of_squares(residual, CHUNKS), mask=exists)

    if ERROR != "none":
        # Residuals of a non-finite block are 0 already: forget its old error as well.
        keep = tl.where(finite, beta, 0.0)[:, None]
        error = ()
        for c in tl.static_range(CHUNKS):
            error = error + (keep * old[c] + one_minus_beta * residual[c],)
        scale_pointer = error_scale_ptr + row
        store_error(error, payload_pointer, scale_pointer, exists, BITS, BLOCK, CHUNKS, ERROR)
