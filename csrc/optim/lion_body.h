// Lion by the compiler's own vectors of kLanes neighbours. Included by lion_vectors.cpp for each instruction
// set, inside of a namespace that is the file's own and for which the compiler may use these instructions.

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = std::uint32_t __attribute__((vector_size(4 * kLanes)));
using Signed = std::int32_t __attribute__((vector_size(4 * kLanes)));
using Halves = std::uint16_t __attribute__((vector_size(2 * kLanes)));
using SignedHalves = std::int16_t __attribute__((vector_size(2 * kLanes)));
using Bytes = std::uint8_t __attribute__((vector_size(kLanes)));

template <class Vector>
MEGATRAIN_FLAT Vector load(const void* section, std::int64_t element) {
  Vector value;
  std::memcpy(&value, static_cast<const std::byte*>(section) + element * (sizeof(Vector) / kLanes),
              sizeof value);
  return value;
}
template <class Vector>
MEGATRAIN_FLAT void store(void* section, std::int64_t element, const Vector& value) {
  std::memcpy(static_cast<std::byte*>(section) + element * (sizeof(Vector) / kLanes), &value, sizeof value);
}
MEGATRAIN_FLAT Words as_words(const Floats& x) { return (Words)x; }
MEGATRAIN_FLAT Floats as_floats(const Words& x) { return (Floats)x; }
MEGATRAIN_FLAT Words wide(const Halves& x) { return __builtin_convertvector(x, Words); }
MEGATRAIN_FLAT Halves narrow(const Words& x) { return __builtin_convertvector(x, Halves); }
MEGATRAIN_FLAT Floats from_bf16(const Halves& x) { return as_floats(wide(x) << 16); }
MEGATRAIN_FLAT Words size_of(const Floats& x) { return as_words(x) & 0x7fffffff; }
MEGATRAIN_FLAT Words not_finite(const Words& x) { return (x & kExponentMask) == kExponentMask; }
MEGATRAIN_FLAT Words upper_half_not_finite(const Words& x) { return (x & 0x7fffffff) >= kInfiniteUpperHalf; }

// random_word of the elements from `index` on.
MEGATRAIN_FLAT Words random_words(const RoundingKey& key, std::uint32_t index) {
  Words lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<std::uint32_t>(i);
  const Words at = lane + index;
  Words x = key.first + (at >> 1) * kWeyl;
  x ^= (x >> 15) ^ key.second;
  x *= kMixing;
  x ^= x >> 16;
  return (at & 1) == 0 ? x : x << 16 | x >> 16;
}
MEGATRAIN_FLAT Words to_bf16(const Floats& x, const Words& random) {
  return (as_words(x) + (size_of(x) > kExponentMask ? Words{} : random)) >> 16;
}

// lion_weight of lion_math.h.
MEGATRAIN_FLAT Floats weight(const LionScalars& s, const Floats& w, const Floats& gradient, Floats& m) {
  const Floats g = gradient * s.gradient_scale;
  const Floats c = s.beta1 * m + s.one_minus_beta1 * g;
  const Words signed_one = (as_words(c) & 0x80000000) | 0x3f800000;
  const Words itself = (size_of(c) == 0) | (size_of(c) > kExponentMask);
  const Floats sign = as_floats(itself != 0 ? as_words(c) : signed_one);
  m = s.beta2 * m + s.one_minus_beta2 * g;
  m = as_floats((as_words(m) & kExponentMask) == 0 ? Words{} : as_words(m));
  return w * s.decay - s.lr * sign;
}

// How each format reads weights and gradients and writes weights. What is stored returns the lanes whose
// weight is not finite.
struct SplitLanes {
  MEGATRAIN_FLAT Floats load_weight(const UpdateSpan& span, std::int64_t i) {
    const auto low = load<SignedHalves>(span.low, i);
    const auto high = wide(load<Halves>(span.weight, i)) << 16;
    return as_floats(high + (Words) __builtin_convertvector(low, Signed));
  }
  MEGATRAIN_FLAT Floats gradient(const UpdateSpan& span, std::int64_t i) {
    return from_bf16(load<Halves>(span.gradient, i));
  }
  MEGATRAIN_FLAT Words store_weight(const UpdateSpan& span, std::int64_t i, const Floats& w, const Words&) {
    const auto bits = as_words(w);
    store(span.weight, i, narrow((bits + 0x8000) >> 16));
    store(span.low, i, narrow(bits));
    return upper_half_not_finite(bits);
  }
};

struct Bf16Lanes {
  MEGATRAIN_FLAT Floats load_weight(const UpdateSpan& span, std::int64_t i) {
    return from_bf16(load<Halves>(span.weight, i));
  }
  MEGATRAIN_FLAT Floats gradient(const UpdateSpan& span, std::int64_t i) {
    return SplitLanes::gradient(span, i);
  }
  MEGATRAIN_FLAT Words store_weight(const UpdateSpan& span, std::int64_t i, const Floats& w,
                                    const Words& random) {
    const auto rounded = to_bf16(w, (random >> 8) & 0xffff);
    store(span.weight, i, narrow(rounded));
    return not_finite(rounded << 16);
  }
};

struct FloatLanes {
  MEGATRAIN_FLAT Floats load_weight(const UpdateSpan& span, std::int64_t i) {
    return load<Floats>(span.weight, i);
  }
  MEGATRAIN_FLAT Floats gradient(const UpdateSpan& span, std::int64_t i) {
    return load<Floats>(span.gradient, i);
  }
  MEGATRAIN_FLAT Words store_weight(const UpdateSpan& span, std::int64_t i, const Floats& w, const Words&) {
    store(span.weight, i, w);
    return not_finite(as_words(w));
  }
};

template <class W>
struct Moments {
  // Weights in memory, the moment in `m`; adds to `bad` where a weight is not finite.
  MEGATRAIN_FLAT void step(const LionScalars& s, const UpdateSpan& span, std::int64_t i, const Words& random,
                           Floats& m, Words& bad) {
    const Floats w = weight(s, W::load_weight(span, i), W::gradient(span, i), m);
    bad |= W::store_weight(span, i, w, random);
  }

  MEGATRAIN_FLAT void with_floats(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span,
                                  std::int64_t end, Words& bad) {
    for (std::int64_t i = 0; i < end; i += kLanes) {
      Floats m = load<Floats>(span.exp_avg, i);
      step(s, span, i, random_words(key, static_cast<std::uint32_t>(span.first + i)), m, bad);
      store(span.exp_avg, i, m);
    }
  }

  MEGATRAIN_FLAT void with_bf16(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span,
                                std::int64_t end, Words& bad) {
    for (std::int64_t i = 0; i < end; i += kLanes) {
      Floats m = from_bf16(load<Halves>(span.exp_avg, i));
      const Words random = random_words(key, static_cast<std::uint32_t>(span.first + i));
      step(s, span, i, random, m, bad);
      store(span.exp_avg, i, narrow(to_bf16(m, random >> 16)));
    }
  }

  MEGATRAIN_FLAT void with_int8(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span,
                                std::int64_t end, Words& bad) {
    using Code = FirstMomentCode;
    constexpr int kVectors = static_cast<int>(kMomentBlock) / kLanes;
    for (std::int64_t begin = 0; begin < end; begin += kMomentBlock) {
      std::uint8_t& exponent = span.exp_avg_exponents[begin / kMomentBlock];
      const Words base = Words{} + Code::base(exponent);
      Words halves[kVectors], randoms[kVectors], largest{};
      for (int k = 0; k < kVectors; ++k) {
        const std::int64_t i = begin + k * kLanes;
        const Words code = __builtin_convertvector(load<Bytes>(span.exp_avg, i), Words);
        const Words magnitude = code & 0x7f;
        const Words bits = magnitude == 0 ? Words{} : base + (magnitude << Code::kShift);
        Floats m = as_floats((bits | (code > 0x80 ? Words{} + 0x8000 : Words{})) << 16);
        randoms[k] = random_words(key, static_cast<std::uint32_t>(span.first + i));
        step(s, span, i, randoms[k], m, bad);
        halves[k] = to_bf16(m, randoms[k] >> 16);
        const Words size = halves[k] & 0x7fff;
        largest = largest > size ? largest : size;
      }
      std::uint32_t most = 0;
      for (int lane = 0; lane < kLanes; ++lane) most = std::max<std::uint32_t>(most, largest[lane]);
      const std::uint32_t renewed = Code::block_exponent(most);
      const Words below = Words{} + Code::base(renewed), top = Words{} + Code::kLargest;
      for (int k = 0; k < kVectors; ++k) {
        const Words size = halves[k] & 0x7fff;
        const Words above = size > below ? size - below : Words{};
        const Words code = (above + ((randoms[k] >> 12) & 15)) >> Code::kShift;
        const Words coded = (code < top ? code : top) | (halves[k] >> 15 << 7);
        store(span.exp_avg, begin + k * kLanes, __builtin_convertvector(coded, Bytes));
      }
      exponent = static_cast<std::uint8_t>(renewed);
    }
  }

  MEGATRAIN_FLAT bool run(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span,
                          std::int64_t& done) {
    Words bad{};
    done = span.count / kLanes * kLanes;
    if (span.moment_format == MomentFormat::kInt8) {
      done = span.count / kMomentBlock * kMomentBlock;
      with_int8(s, key, span, done, bad);
    } else if (span.moment_format == MomentFormat::kBf16) {
      with_bf16(s, key, span, done, bad);
    } else {
      with_floats(s, key, span, done, bad);
    }
    std::uint32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= bad[lane];
    return any == 0;
  }
};

// Not inlined: its caller has other instructions.
[[gnu::noinline]] bool run(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span,
                           std::int64_t& done) {
  switch (span.weight_format) {
    case WeightFormat::kBf16:
      return Moments<Bf16Lanes>::run(s, key, span, done);
    case WeightFormat::kFp32:
      return Moments<FloatLanes>::run(s, key, span, done);
    case WeightFormat::kBf16Split:
      break;
  }
  return Moments<SplitLanes>::run(s, key, span, done);
}
