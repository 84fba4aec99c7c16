// The codec on CPUs: the arithmetic of loco_fsdp/codec/eager.py, one block after the other.
//
// A block is widened to float32 in buffers that stay in the first level of cache, so gradient,
// error and wire are read and written once. Loops over its elements are the compiler's to
// vectorize. It may neither contract a * b + c nor reorder a sum (cpu_build.py), except where
// `omp simd reduction` allows it.
//
// The wire, its blocks and the table of them are described in loco_fsdp/codec/layout.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu_dtypes.h"

namespace {

constexpr int kMaxBlock = 1024;
constexpr float kSmallestNormal = 0x1p-126f;

// Four-level Lloyd-Max quantizer of a unit Gaussian.
constexpr float kSmallLevel = 0.4528f, kLargeLevel = 1.510f, kThreshold = 0.9816f;

// A thread costs about as much as encoding this many elements.
constexpr int64_t kElementsPerThread = 1 << 16;

// ------------------------------------------------------------------------------- quantization

// Bits of the largest magnitude: more than those of infinity where there is a NaN.
int32_t absmax_bits(const float* x, int size) {
  int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int i = 0; i < size; ++i) largest = std::max(largest, bits_of(x[i]) & kMagnitudeBits);
  return largest;
}

// 0 where nothing can be sent, NaN where the block is not finite. `h` is zero beyond `length`.
template <int kBits>
float block_scale(const float* h, int size, int64_t length) {
  const int32_t largest = absmax_bits(h, size);
  if (largest >= kInfinityBits) return NAN;
  float scale, top;
  if constexpr (kBits >= 4) {
    top = (1 << (kBits - 1)) - 1;
    scale = from_bits(largest) / top;
  } else {
    // Squares would leave the range of float32: bring the block near 1 by a power of two first.
    const float unit = from_bits(power_of_two_bits(std::max(exponent_of(largest), -126)));
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < size; ++i) {
      const double x = h[i] / unit;
      sum += kBits == 2 ? x * x : std::fabs(x);
    }
    const double moment = sum / length;
    top = kBits == 2 ? kLargeLevel : 1.0f;
    scale = static_cast<float>(kBits == 2 ? std::sqrt(moment) : moment) * unit;
  }
  if (scale < kSmallestNormal) scale = 0;
  return std::isfinite(scale * top) ? scale : NAN;
}

// Codes of `h`, packed, and their levels. A scale of 0 or NaN divides to zeros.
template <int kBits>
void quantize(const float* h, int size, float scale, float* level, uint8_t* packed) {
  const float divisor = scale > 0 ? scale : INFINITY;
  uint8_t codes[kMaxBlock];
  for (int i = 0; i < size; ++i) {
    const float x = h[i] / divisor;
    if constexpr (kBits >= 4) {
      // The scale is a normal number, hence |x| < m + 0.5: there is nothing to clamp.
      const float rounded = x + kRoundToInteger;
      level[i] = rounded - kRoundToInteger;
      codes[i] = static_cast<uint8_t>(bits_of(rounded));
    } else {
      const bool large = kBits == 2 && std::fabs(x) > kThreshold;
      const float magnitude = kBits == 1 ? 1.0f : large ? kLargeLevel : kSmallLevel;
      level[i] = x < 0 ? -magnitude : magnitude;
      codes[i] = x < 0 ? -1 - large : large;
    }
  }
  constexpr int kPlanes = 8 / kBits, kMask = (1 << kBits) - 1;
  const int bytes = size / kPlanes;
  for (int i = 0; i < bytes; ++i) {
    int byte = 0;
    for (int plane = 0; plane < kPlanes; ++plane) {
      byte |= (codes[i + plane * bytes] & kMask) << (plane * kBits);
    }
    packed[i] = static_cast<uint8_t>(byte);
  }
}

// Adds `scale` times the levels of packed codes to `total`.
template <int kBits>
void add_levels(const uint8_t* packed, int size, float scale, float* total) {
  const int bytes = size * kBits / 8;
  for (int plane = 0; plane < 8 / kBits; ++plane) {
    float* sum = total + plane * bytes;
    for (int i = 0; i < bytes; ++i) {
      // Shifting to the top and back down extends the sign.
      const uint32_t top = uint32_t{packed[i]} << (32 - kBits - plane * kBits);
      const int32_t code = static_cast<int32_t>(top) >> (32 - kBits);
      float level = static_cast<float>(code);
      if constexpr (kBits == 1) level = 1 + 2 * level;
      if constexpr (kBits == 2) {
        const float magnitude = (code ^ code >> 1) & 1 ? kLargeLevel : kSmallLevel;
        level = code < 0 ? -magnitude : magnitude;
      }
      sum[i] += level * scale;
    }
  }
}

// Calls `function` with a type whose `value` is `bits`.
template <class Function>
void with_bits(int64_t bits, Function function) {
  switch (bits) {
    case 8: return function(std::integral_constant<int, 8>());
    case 4: return function(std::integral_constant<int, 4>());
    case 2: return function(std::integral_constant<int, 2>());
    case 1: return function(std::integral_constant<int, 1>());
  }
}

}  // namespace

// ------------------------------------------------------------------- arguments of compiled.py

struct Blocks {
  int64_t bits, block_size, num_blocks, row_bytes, scales_offset;
  const int64_t *starts, *lengths, *rows;
  const int64_t* row_starts;  // [wire_rows + 1], or null: every row holds all blocks of a peer
  int64_t wire_rows, threads;

  int64_t bytes_per_block() const { return block_size * bits / 8; }
};

struct State {
  float* squares;      // [peers, num_blocks, 2]
  int64_t* nonfinite;  // [1]
  void* payload;       // [peers, num_rows, block_size], or null
  float* error_scale;  // [peers, num_rows]
  int64_t error_dtype, error_top_exponent, num_rows;
  float beta, one_minus_beta;
};

namespace {

// A block on the wire: the first byte of its row, and its number in that row.
template <class Byte>
struct Place {
  Byte* row;
  int64_t number;

  Byte* codes(const Blocks& blocks) const { return row + number * blocks.bytes_per_block(); }
  Byte* scale(const Blocks& blocks) const {
    return row + blocks.scales_offset + number * sizeof(float);
  }
};

template <class Byte>
Place<Byte> place(const Blocks& blocks, Byte* wire, int64_t peer, int64_t block) {
  if (!blocks.row_starts) return {wire + peer * blocks.row_bytes, block};
  const int64_t* end = blocks.row_starts + blocks.wire_rows + 1;
  const int64_t row = std::upper_bound(blocks.row_starts, end, block) - blocks.row_starts - 1;
  return {wire + row * blocks.row_bytes, block - blocks.row_starts[row]};
}

// Compensates `h` by the error of its row, encodes it, and updates the error.
template <int kBits>
void encode_block(const Blocks& blocks, const State& state, int64_t peer, int64_t block, float* h,
                  uint8_t* wire, int64_t* nonfinite) {
  const int size = static_cast<int>(blocks.block_size);
  const int64_t length = blocks.lengths[block];
  const int64_t row = peer * state.num_rows + blocks.rows[block];
  float old[kMaxBlock], level[kMaxBlock];
  std::fill(h + length, h + size, 0.0f);
  if (state.payload) {
    const float unit = state.error_scale[row];
    load(state.payload, state.error_dtype, row * size, size, old);
    for (int i = 0; i < size; ++i) {
      old[i] *= unit;
      h[i] += old[i];
    }
  } else {
    std::fill(old, old + size, 0.0f);
  }

  float scale = block_scale<kBits>(h, size, length);
  const Place<uint8_t> to = place(blocks, wire, peer, block);
  std::memcpy(to.scale(blocks), &scale, sizeof scale);
  if (std::isnan(scale)) {  // from here on a block of zeros, which leaves no error
    ++*nonfinite;
    scale = 0;
    std::fill(h, h + size, 0.0f);
    std::fill(old, old + size, 0.0f);
  }
  quantize<kBits>(h, size, scale, level, to.codes(blocks));
  std::fill(level + length, level + size, 0.0f);  // 1 and 2 bits have no level of zero

  float sent = 0, left = 0;
  float* error = level;
#pragma omp simd reduction(+ : sent, left)
  for (int i = 0; i < size; ++i) {
    const float residual = h[i] - level[i] * scale;
    sent += h[i] * h[i];
    left += residual * residual;
    error[i] = state.beta * old[i] + state.one_minus_beta * residual;
  }
  float* squares = state.squares + 2 * (peer * blocks.num_blocks + block);
  squares[0] = sent;
  squares[1] = left;

  if (state.payload) {
    const int32_t exponent = exponent_of(absmax_bits(error, size)) -
                             static_cast<int32_t>(state.error_top_exponent);
    const float unit = from_bits(power_of_two_bits(std::max(exponent, -126)));
    const float inverse = 1 / unit;  // a power of two, too: multiplying rounds like dividing
    for (int i = 0; i < size; ++i) error[i] *= inverse;
    store(error, state.payload, state.error_dtype, row * size, size);
    state.error_scale[row] = unit;
  }
}

// Adds to `total` what a row of the wire holds of a block.
template <int kBits>
void add_block(const Blocks& blocks, const uint8_t* wire, int64_t row, int64_t block,
               float* total) {
  const Place<const uint8_t> from = place(blocks, wire, row, block);
  float scale;
  std::memcpy(&scale, from.scale(blocks), sizeof scale);
  add_levels<kBits>(from.codes(blocks), static_cast<int>(blocks.block_size), scale, total);
}

// The sum over `peers` in the order of their ranks, times `factor`.
template <int kBits>
void decode_block(const Blocks& blocks, const uint8_t* wire, int64_t peers, int64_t block,
                  float factor, float* total) {
  const int size = static_cast<int>(blocks.block_size);
  std::fill(total, total + size, 0.0f);
  for (int64_t peer = 0; peer < peers; ++peer) add_block<kBits>(blocks, wire, peer, block, total);
  for (int i = 0; i < size; ++i) total[i] *= factor;
}

// Calls `function(first, last)` for ranges of `count` blocks, in threads if there are enough.
template <class Function>
void in_parallel(const Blocks& blocks, int64_t count, Function function) {
  const int64_t useful = count * blocks.block_size / kElementsPerThread;
  const int64_t threads = std::max<int64_t>(1, std::min(blocks.threads, useful));
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) {
    others.emplace_back(function, count * i / threads, count * (i + 1) / threads);
  }
  function(int64_t{0}, count / threads);
  for (std::thread& other : others) other.join();
}

// Encodes all blocks of all peers; `fill(bits, peer, block, h)` writes the elements
// of one.
template <class Fill>
void encode_blocks(const Blocks& blocks, const State& state, int64_t peers, uint8_t* wire,
                   Fill fill) {
  with_bits(blocks.bits, [&](auto bits) {
    in_parallel(blocks, peers * blocks.num_blocks, [&](int64_t first, int64_t last) {
      float h[kMaxBlock];
      int64_t nonfinite = 0;
      for (int64_t i = first; i < last; ++i) {
        const int64_t peer = i / blocks.num_blocks, block = i % blocks.num_blocks;
        fill(bits, peer, block, h);
        encode_block<bits()>(blocks, state, peer, block, h, wire, &nonfinite);
      }
      if (nonfinite) __atomic_fetch_add(state.nonfinite, nonfinite, __ATOMIC_RELAXED);
    });
  });
}

}  // namespace

extern "C" {

// gradient: [peers, shard_numel]; wire: [peers, row_bytes], or [wire_rows, row_bytes] of one peer
void loco_encode(const Blocks* blocks, const State* state, const void* gradient, int64_t dtype,
                 int64_t shard_numel, int64_t peers, uint8_t* wire) {
  encode_blocks(*blocks, *state, peers, wire, [&](auto, int64_t peer, int64_t block, float* h) {
    load(gradient, dtype, peer * shard_numel + blocks->starts[block], blocks->lengths[block], h);
  });
}

// wire: [peers, row_bytes], or [wire_rows, row_bytes] of one peer; output: [shard_numel]
void loco_decode(const Blocks* blocks, const uint8_t* wire, int64_t peers, float factor,
                 void* output, int64_t dtype) {
  with_bits(blocks->bits, [&](auto bits) {
    in_parallel(*blocks, blocks->num_blocks, [&](int64_t first, int64_t last) {
      float total[kMaxBlock];
      for (int64_t block = first; block < last; ++block) {
        decode_block<bits()>(*blocks, wire, peers, block, factor, total);
        store(total, output, dtype, blocks->starts[block], blocks->lengths[block]);
      }
    });
  });
}

// received: [peers, row_bytes]; wire: [1, row_bytes]; every row holds all blocks
void loco_decode_encode(const Blocks* blocks, const State* state, const uint8_t* received,
                        int64_t peers, float factor, uint8_t* wire) {
  encode_blocks(*blocks, *state, 1, wire, [&](auto bits, int64_t, int64_t block, float* h) {
    decode_block<bits()>(*blocks, received, peers, block, factor, h);
  });
}

// parameter, replica: [shard_numel]; wire: [1, row_bytes]
void loco_encode_difference(const Blocks* blocks, const State* state, const void* parameter,
                            int64_t parameter_dtype, const void* replica, int64_t replica_dtype,
                            uint8_t* wire) {
  encode_blocks(*blocks, *state, 1, wire, [&](auto, int64_t, int64_t block, float* h) {
    float subtracted[kMaxBlock];
    const int64_t start = blocks->starts[block], length = blocks->lengths[block];
    load(parameter, parameter_dtype, start, length, h);
    load(replica, replica_dtype, start, length, subtracted);
    for (int64_t i = 0; i < length; ++i) h[i] -= subtracted[i];
  });
}

// wire: [rows, row_bytes]; output_rows: [rows], all different; output: [num_rows, shard_numel]
void loco_decode_rows(const Blocks* blocks, const uint8_t* wire, int64_t rows,
                      const int64_t* output_rows, bool add, void* output, int64_t dtype,
                      int64_t shard_numel) {
  with_bits(blocks->bits, [&](auto bits) {
    in_parallel(*blocks, rows * blocks->num_blocks, [&](int64_t first, int64_t last) {
      float total[kMaxBlock];
      for (int64_t i = first; i < last; ++i) {
        const int64_t row = i / blocks->num_blocks, block = i % blocks->num_blocks;
        const int64_t index = output_rows[row] * shard_numel + blocks->starts[block];
        const int64_t length = blocks->lengths[block];
        std::fill(total, total + blocks->block_size, 0.0f);
        if (add) load(output, dtype, index, length, total);
        add_block<bits()>(*blocks, wire, row, block, total);
        store(total, output, dtype, index, length);
      }
    });
  });
}

// `drop_spike` of loco_fsdp/codec/spikes.py.
// squares: [peers, num_blocks, 2]; error_scale: [peers, num_rows]; rows: [num_blocks]
void loco_drop_spike(const float* squares, int64_t peers, int64_t num_blocks, double* usual,
                     float* error_scale, int64_t num_rows, const int64_t* rows, double limit,
                     double decay) {
  double sum = 0;
  const int64_t num_squares = peers * num_blocks;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < num_squares; ++i) sum += squares[2 * i];
  const double norm = std::sqrt(sum);
  const double highest = usual[0] > 0 ? limit * (usual[1] / usual[0]) : INFINITY;
  const bool spike = norm > highest || std::isinf(norm);
  const double lower = std::min(norm, highest);
  const double usual_norm = std::isinf(lower) ? 0 : lower;
  usual[0] = decay * usual[0] + usual_norm;
  usual[1] = decay * usual[1] + usual_norm * usual_norm;
  usual[2] += spike;
  if (!spike) return;
  for (int64_t peer = 0; peer < peers; ++peer) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      error_scale[peer * num_rows + rows[block]] = 0;
    }
  }
}

}  // extern "C"
