// One decode step of an INT8 decoder in one call, for processors with AVX-512 VNNI.
//
// A step multiplies every weight by a few rows only. Written as tensor operations it is some ninety
// small ones per layer, whose dispatch takes longer than reading the weights does. Here one team of
// threads walks through the layers together, and every loop below ends in a barrier.
//
// Nothing but pointers and numbers crosses the border (see native.py), so the library is bound to
// no version of torch or Python. It shares torch's OpenMP, hence its threads. All activations, keys
// and values are float32; what is summed, and in which order, does not depend on the other rows.
//
// Shapes: B rows (running sequences), I inputs and O outputs of a matrix, D head dimension, L
// positions of a row of the cache.

#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// A product is cut into tiles whose sums stay in registers, of which there are 32. An INT8 tile is
// tall: the more rows it has, the fewer times weights are read. One of attention is wide, for there
// the rows are the few queries that share a key.
constexpr int64_t BLOCK = 32;  // outputs of an INT8 tile: 12 x 2 sums of sixteen, and 2 weights
constexpr int TALL = 12;
constexpr int64_t WIDE = 64;   // columns of a float tile: 6 x 4 sums, and 4 of the other matrix
constexpr int LOW = 6;

}  // namespace

// The structures that native.py fills; it holds the same fields in the same order.

struct Matrix {
  const uint8_t* blocks;  // [O / 32, I / 4, 32, 4]: codes plus 128; what is padded is 0 plus 128
  const float* scale;     // [O]
  int64_t inputs, outputs;
};

struct Layer {
  const float* input_norm;  // [H]
  Matrix qkv;
  const float* qkv_bias;  // [O] or null
  const float* qk_norm;   // [heads + kv_heads, D] or null
  Matrix out;
  const float* post_norm;  // [H]
  Matrix gate_up, down;
  float* keys;    // [rows, kv_heads, D, L]
  float* values;  // [rows, kv_heads, L, D]
};

struct Model {
  const Layer* layer;
  const float* frequencies;  // [D / 2] radians per position
  int64_t layers, hidden, heads, kv_heads, dim, intermediate;
  float eps, largest;  // of RMSNorm; the largest code of an activation
};

namespace {

int64_t padded(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Activations as codes, with what turns products back into numbers.
struct Codes {
  int8_t* codes;  // [B, stride], 0 behind the inputs
  float* scale;   // [B]
  int32_t* sum;   // [B] of the codes
  int64_t stride;

  // The arithmetic of quant.quantize_tokens, to the last bit.
  void quantize(int64_t row, const float* x, int64_t inputs, float largest) {
    // Magnitudes order as integers as they do as numbers, and nan lies above them all.
    int32_t top = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      int32_t bits;
      std::memcpy(&bits, x + i, sizeof bits);
      top = std::max(top, bits & 0x7fffffff);
    }
    float magnitude;
    std::memcpy(&magnitude, &top, sizeof top);
    const float unit = magnitude / largest < FLT_MIN ? FLT_MIN : magnitude / largest;
    int8_t* out = codes + row * stride;
    int32_t total = 0;
    for (int64_t i = 0; i < inputs; ++i) {
      const int32_t code = static_cast<int32_t>(std::nearbyintf(x[i] / unit));
      out[i] = static_cast<int8_t>(code);
      total += static_cast<int8_t>(code);
    }
    std::fill(out + inputs, out + stride, 0);
    scale[row] = unit;
    sum[row] = total;
  }
};

// sums[r, o] of ROWS rows by one block of weights. Weights are the unsigned operand of the
// instruction, so that what their 128 adds is 128 times the sum of a row's codes.
template <int ROWS>
void int8_tile(const int8_t* a, int64_t stride, const uint8_t* w, int64_t quads, int32_t* sums) {
  __m512i sum[ROWS][2] = {};
  for (int64_t k = 0; k < quads; ++k, w += 4 * BLOCK) {
    const __m512i left = _mm512_loadu_si512(w), right = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      int32_t four;
      std::memcpy(&four, a + r * stride + 4 * k, sizeof four);
      const __m512i codes = _mm512_set1_epi32(four);
      sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], left, codes);
      sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], right, codes);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r) {
    _mm512_storeu_si512(sums + r * BLOCK, sum[r][0]);
    _mm512_storeu_si512(sums + r * BLOCK + 16, sum[r][1]);
  }
}

// c[r, n] = sum_k a[r, k] * b[k, n] for up to 64 columns n: both products of attention.
template <int ROWS>
void float_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                float* c, int64_t c_stride, int64_t columns) {
  __mmask16 mask[4];
  for (int j = 0; j < 4; ++j)
    mask[j] = _cvtu32_mask16((1u << std::clamp<int64_t>(columns - 16 * j, 0, 16)) - 1);
  __m512 sum[ROWS][4] = {};
  for (int64_t k = 0; k < depth; ++k, b += b_stride) {
    __m512 part[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) part[j] = _mm512_maskz_loadu_ps(mask[j], b + 16 * j);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
      const __m512 one = _mm512_set1_ps(a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) sum[r][j] = _mm512_fmadd_ps(one, part[j], sum[r][j]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      _mm512_mask_storeu_ps(c + r * c_stride + 16 * j, mask[j], sum[r][j]);
}

constexpr decltype(&int8_tile<1>) INT8_TILES[] = {
    int8_tile<1>, int8_tile<2>, int8_tile<3>, int8_tile<4>,  int8_tile<5>,  int8_tile<6>,
    int8_tile<7>, int8_tile<8>, int8_tile<9>, int8_tile<10>, int8_tile<11>, int8_tile<12>};
constexpr decltype(&float_tile<1>) FLOAT_TILES[] = {float_tile<1>, float_tile<2>, float_tile<3>,
                                                    float_tile<4>, float_tile<5>, float_tile<6>};

// y = codes @ weights, scaled, plus the addend (of step 0: one for all rows; may be null or y).
void multiply(const Matrix& matrix, const Codes& a, int64_t rows, const float* addend, int64_t step,
              float* y) {
  const int64_t quads = padded(matrix.inputs, 4) / 4, tiles = (rows + TALL - 1) / TALL;
#pragma omp for
  for (int64_t start = 0; start < matrix.outputs; start += BLOCK) {
    const uint8_t* block = matrix.blocks + start * quads * 4;
    const int64_t columns = std::min(BLOCK, matrix.outputs - start);
    const float* scale = matrix.scale + start;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = rows * t / tiles, count = rows * (t + 1) / tiles - first;
      int32_t sums[TALL * BLOCK];
      INT8_TILES[count - 1](a.codes + first * a.stride, a.stride, block, quads, sums);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t row = first + r;
        const int32_t shift = 128 * a.sum[row];
        const float unit = a.scale[row];
        float* out = y + row * matrix.outputs + start;
        const float* more = addend ? addend + row * step + start : nullptr;
        for (int64_t o = 0; o < columns; ++o) {
          const float one = static_cast<float>(sums[r * BLOCK + o] - shift) * scale[o];
          out[o] = more ? std::fma(one, unit, more[o]) : one * unit;  // as torch.addcmul does
        }
      }
    }
  }
}

void rms_norm(const float* x, const float* weight, int64_t count, float eps, float* y) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < count; ++i) squares += x[i] * x[i];
  const float inverse = 1 / std::sqrt(squares / count + eps);
  for (int64_t i = 0; i < count; ++i) y[i] = x[i] * inverse * weight[i];
}

// e^x within two units in the last place, of x cut to where it is finite and normal; nan stays nan.
inline float exponential(float x) {
  const float clamped = x < -87 ? -87 : x > 88 ? 88 : x;
  const float whole = std::nearbyintf(clamped * 1.44269504f);
  const float rest = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float power = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f})
    power = power * rest + c;
  power = power * rest * rest + rest + 1;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23;
  float two;
  std::memcpy(&two, &bits, sizeof two);
  return power * two;
}

// Rotate pairs of channels half a head apart, as Hugging Face models are trained.
void rotate(float* head, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = head[i], high = head[i + half];
    head[i] = low * cosine[i] - high * sine[i];
    head[i + half] = high * cosine[i] + low * sine[i];
  }
}

// One new token of one row, for one key head and the query heads that share it: its key and value
// go into the cache, and ``mixed`` [group, D] is what the queries find there.
void attend(const Model& model, const Layer& layer, int64_t slot, int64_t position, int64_t length,
            float* query, const float* key, const float* value, float* mixed) {
  const int64_t dim = model.dim, group = model.heads / model.kv_heads;
  const int64_t seen = position + 1, span = padded(seen, WIDE);
  float* keys = layer.keys + slot * dim * length;
  float* values = layer.values + slot * dim * length;
  for (int64_t d = 0; d < dim; ++d) keys[d * length + position] = key[d];
  std::copy(value, value + dim, values + position * dim);

  thread_local std::vector<float> scores;
  scores.resize(LOW * span);
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  for (int64_t first = 0; first < group; first += LOW) {
    const int64_t count = std::min<int64_t>(LOW, group - first);
    const auto tile = FLOAT_TILES[count - 1];
    for (int64_t at = 0; at < span; at += WIDE)  // rows are a multiple of WIDE long
      tile(query + first * dim, dim, keys + at, length, dim, &scores[at], span, WIDE);
    for (int64_t r = 0; r < count; ++r) {
      float* score = &scores[r * span];
      float top = -FLT_MAX, total = 0;
#pragma omp simd reduction(max : top)
      for (int64_t l = 0; l < seen; ++l) top = std::max(top, score[l]);
#pragma omp simd reduction(+ : total)
      for (int64_t l = 0; l < seen; ++l) {
        score[l] = exponential((score[l] - top) * scale);
        total += score[l];
      }
      for (int64_t l = 0; l < seen; ++l) score[l] /= total;
    }
    for (int64_t at = 0; at < dim; at += WIDE)
      tile(scores.data(), span, values + at, dim, seen, mixed + first * dim + at, dim,
           std::min(WIDE, dim - at));
  }
}

// Where a step keeps what lies between two products; it grows to the largest step's size.
struct Scratch {
  std::vector<int8_t> bytes;
  std::vector<float> numbers;
  std::vector<int32_t> sums;

  Codes codes(int64_t rows, int64_t inputs) {
    const int64_t stride = padded(inputs, 4);
    bytes.resize(std::max<size_t>(bytes.size(), rows * stride));
    sums.resize(std::max<size_t>(sums.size(), rows));
    return {bytes.data(), nullptr, sums.data(), stride};
  }
};

thread_local Scratch scratch;

}  // namespace

extern "C" {

uint32_t source() { return QURL_SOURCE; }

// Lay [O, I] codes out for ``multiply``; ``blocks`` is filled whole.
void pack(const int8_t* weight, int64_t outputs, int64_t inputs, uint8_t* blocks, int threads) {
  const int64_t width = padded(inputs, 4);
#pragma omp parallel for num_threads(threads)
  for (int64_t start = 0; start < outputs; start += BLOCK)
    for (int64_t i = 0; i < width; ++i)
      for (int64_t o = start; o < start + BLOCK; ++o) {
        const int8_t code = o < outputs && i < inputs ? weight[o * inputs + i] : 0;
        blocks[start * width + (i / 4 * BLOCK + o - start) * 4 + i % 4] = code ^ 0x80;
      }
}

// y [rows, O] = x [rows, I] quantized, times the weights, plus the addend (see ``multiply``).
void linear(const Matrix* matrix, const float* x, int64_t rows, float largest, const float* addend,
            int64_t step, float* y, int threads) {
  Codes codes = scratch.codes(rows, matrix->inputs);
  scratch.numbers.resize(std::max<size_t>(scratch.numbers.size(), rows));
  codes.scale = scratch.numbers.data();
#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int64_t row = 0; row < rows; ++row)
      codes.quantize(row, x + row * matrix->inputs, matrix->inputs, largest);
    multiply(*matrix, codes, rows, addend, step, y);
  }
}

// Take x [B, H] through all layers, in place. Row b of the batch is row b of the cache, and
// position[b] where its new key and value go.
void decode(const Model* given, const int64_t* position, int64_t batch, int64_t length, float* x,
            int threads) {
  const Model model = *given;
  const int64_t hidden = model.hidden, dim = model.dim, half = dim / 2, wide = model.intermediate;
  const int64_t heads = model.heads, kv_heads = model.kv_heads, group = heads / kv_heads;
  const int64_t rotated = heads + kv_heads, width = (heads + 2 * kv_heads) * dim;
  const int64_t inner = std::max(2 * wide, width), outer = std::max(hidden, heads * dim);
  const float largest = model.largest;

  const int64_t each = inner + outer + dim + 1;
  scratch.numbers.resize(std::max<size_t>(scratch.numbers.size(), batch * each));
  float* product = scratch.numbers.data();        // [B, O]
  float* state = product + batch * inner;         // [B, I]
  float* cosine = state + batch * outer;          // [B, D / 2]
  float* sine = cosine + batch * half;            // [B, D / 2]
  Codes of_hidden = scratch.codes(batch, std::max(outer, wide));
  of_hidden.scale = sine + batch * half;
  Codes of_mixed = of_hidden, of_wide = of_hidden;
  of_hidden.stride = padded(hidden, 4);
  of_mixed.stride = padded(heads * dim, 4);
  of_wide.stride = padded(wide, 4);

#pragma omp parallel num_threads(threads)
  {
#pragma omp for
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(position[b]) * model.frequencies[i];
        cosine[b * half + i] = std::cos(angle);
        sine[b * half + i] = std::sin(angle);
      }
    for (int64_t index = 0; index < model.layers; ++index) {
      const Layer& layer = model.layer[index];
      const auto normed = [&](int64_t b, const float* weight) {
        float* y = state + b * outer;
        rms_norm(x + b * hidden, weight, hidden, model.eps, y);
        of_hidden.quantize(b, y, hidden, largest);
      };
#pragma omp for
      for (int64_t b = 0; b < batch; ++b) normed(b, layer.input_norm);
      multiply(layer.qkv, of_hidden, batch, layer.qkv_bias, 0, product);
#pragma omp for
      for (int64_t slot = 0; slot < batch * kv_heads; ++slot) {
        const int64_t b = slot / kv_heads, g = slot % kv_heads;
        float* row = product + b * width;
        const auto prepared = [&](int64_t head) {
          float* at = row + head * dim;
          if (layer.qk_norm) rms_norm(at, layer.qk_norm + head * dim, dim, model.eps, at);
          rotate(at, cosine + b * half, sine + b * half, half);
          return at;
        };
        for (int64_t h = 0; h < group; ++h) prepared(g * group + h);
        attend(model, layer, slot, position[b], length, row + g * group * dim, prepared(heads + g),
               row + (rotated + g) * dim, state + b * outer + g * group * dim);
      }
#pragma omp for
      for (int64_t b = 0; b < batch; ++b)
        of_mixed.quantize(b, state + b * outer, heads * dim, largest);
      multiply(layer.out, of_mixed, batch, x, hidden, x);
#pragma omp for
      for (int64_t b = 0; b < batch; ++b) normed(b, layer.post_norm);
      multiply(layer.gate_up, of_hidden, batch, nullptr, 0, product);
#pragma omp for
      for (int64_t b = 0; b < batch; ++b) {
        float* gate = product + b * 2 * wide;
        for (int64_t i = 0; i < wide; ++i)
          gate[i] = gate[i] / (1 + exponential(-gate[i])) * gate[wide + i];
        of_wide.quantize(b, gate, wide, largest);
      }
      multiply(layer.down, of_wide, batch, x, hidden, x);
    }
  }
}

}  // extern "C"
