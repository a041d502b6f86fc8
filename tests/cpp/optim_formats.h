// One parameter in any format of weights and moments, with guards around it, for the tests of the
// update's precision modes.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "optim/adamw_math.h"
#include "optim/moments.h"
#include "optim_data.h"

namespace megatrain::testing {

struct Formats {
  WeightFormat weights;
  MomentFormat moments;
};

inline std::string format_text(const Formats& formats) {
  constexpr const char* kWeights[] = {"split", "bf16", "fp32"};
  constexpr const char* kMoments[] = {"fp32", "bf16", "int8"};
  return std::string(kWeights[static_cast<int>(formats.weights)]) + "_with_" +
         kMoments[static_cast<int>(formats.moments)];
}

inline std::vector<Formats> all_formats() {
  std::vector<Formats> all;
  for (const auto weights : {WeightFormat::kBf16Split, WeightFormat::kBf16, WeightFormat::kFp32}) {
    for (const auto moments : {MomentFormat::kFp32, MomentFormat::kBf16, MomentFormat::kInt8}) {
      all.push_back({weights, moments});
    }
  }
  return all;
}

class FormattedParameter {
 public:
  // `offset` elements lie before the span and kGuard after it in every array.
  static constexpr std::size_t kGuard = 300;

  FormattedParameter(Formats formats, std::size_t count, std::size_t offset = 0, std::int64_t first = 0)
      : formats_(formats),
        count_(count),
        offset_(offset),
        first_(first),
        weight_(size() * weight_bytes()),
        gradient_(size() * weight_bytes()),
        exp_avg_(size() * moment_bytes()),
        exp_avg_sq_(size() * moment_bytes()),
        low_(size()),
        exponents_(2 * (blocks() + 2)) {}

  std::size_t count() const { return count_; }
  Formats formats() const { return formats_; }

  static constexpr std::size_t kArrays = 6;
  // All memory, guards included; copies of it elsewhere make a span by span_in.
  std::array<std::span<std::byte>, kArrays> arrays() {
    return {weight_,
            gradient_,
            exp_avg_,
            exp_avg_sq_,
            std::as_writable_bytes(std::span(low_)),
            std::as_writable_bytes(std::span(exponents_))};
  }
  UpdateSpan span_in(const std::array<std::byte*, kArrays>& at) const {
    return {.weight_format = formats_.weights,
            .moment_format = formats_.moments,
            .weight = at[0] + offset_ * weight_bytes(),
            .low = reinterpret_cast<std::int16_t*>(at[4]) + offset_,
            .gradient = at[1] + offset_ * weight_bytes(),
            .exp_avg = at[2] + offset_ * moment_bytes(),
            .exp_avg_sq = at[3] + offset_ * moment_bytes(),
            .exp_avg_exponents = reinterpret_cast<std::uint8_t*>(at[5]) + 1,
            .exp_avg_sq_exponents = reinterpret_cast<std::uint8_t*>(at[5]) + blocks() + 2,
            .count = static_cast<std::int64_t>(count_),
            .first = first_};
  }
  UpdateSpan span() {
    std::array<std::byte*, kArrays> own;
    for (std::size_t i = 0; i < kArrays; ++i) own[i] = arrays()[i].data();
    return span_in(own);
  }

  // Everything, guards included, of any size: zeros, denormals and huge values among it. Codes and
  // exponents take every value but those of infinities.
  void fill_any(Values& values) {
    for (std::size_t i = 0; i < size(); ++i) {
      put_weight(i, values.any(0.02f, 1e30f));
      put_gradient(i, values.any(1e-3f, 1e15f));
      const float m = values.any(1e-3f, 1e15f), v = std::abs(values.any(1e-6f, 1e30f));
      put_moment(exp_avg_, i, m, values.random()());
      put_moment(exp_avg_sq_, i, v, values.random()());
    }
    for (std::size_t i = 0; i < exponents_.size(); ++i) {
      const bool plain = values.random()() % 2 == 0;
      exponents_[i] =
          static_cast<std::uint8_t>(plain ? 100 + values.random()() % 30 : values.random()() % 190);
    }
  }

  void set_weight(std::size_t i, float value) { put_weight(offset_ + i, value); }
  void set_gradient(std::size_t i, float value) { put_gradient(offset_ + i, value); }
  // Moments of the whole parameter, rounded to nearest.
  void set_moments(Moment moment, const std::vector<float>& values) {
    write_moments(moment_span(moment), values.data());
  }
  std::vector<float> moments(Moment moment) {
    std::vector<float> values(count_);
    read_moments(moment_span(moment), values.data());
    return values;
  }
  float weight(std::size_t i) const {
    const std::size_t at = offset_ + i;
    if (formats_.weights == WeightFormat::kFp32) return get<float>(weight_, at);
    const std::uint32_t high = std::uint32_t{get<std::uint16_t>(weight_, at)} << 16;
    if (formats_.weights == WeightFormat::kBf16) return float_of(high);
    return float_of(high + static_cast<std::uint32_t>(std::int32_t{low_[at]}));
  }
  float gradient(std::size_t i) const {
    const std::size_t at = offset_ + i;
    if (formats_.weights == WeightFormat::kFp32) return get<float>(gradient_, at);
    return megatrain::from_bf16(get<std::uint16_t>(gradient_, at));
  }
  // Of the block of element i, as the power of two that its codes are relative to.
  float block_unit(Moment moment, std::size_t i) {
    const MomentSpan span = moment_span(moment);
    return std::ldexp(1.0f, static_cast<int>(span.exponents[i / kMomentBlock]) - 127);
  }

  // Guards compared too.
  friend bool operator==(const FormattedParameter& a, const FormattedParameter& b) {
    return a.weight_ == b.weight_ && a.gradient_ == b.gradient_ && a.exp_avg_ == b.exp_avg_ &&
           a.exp_avg_sq_ == b.exp_avg_sq_ && a.low_ == b.low_ && a.exponents_ == b.exponents_;
  }

 private:
  using Bytes = std::vector<std::byte>;

  std::size_t size() const { return offset_ + count_ + kGuard; }
  std::size_t blocks() const { return (count_ + kMomentBlock - 1) / kMomentBlock; }
  std::size_t weight_bytes() const { return formats_.weights == WeightFormat::kFp32 ? 4 : 2; }
  std::size_t moment_bytes() const {
    return formats_.moments == MomentFormat::kFp32 ? 4 : formats_.moments == MomentFormat::kBf16 ? 2 : 1;
  }
  template <class T>
  static T get(const Bytes& bytes, std::size_t i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  static void put(Bytes& bytes, std::size_t i, T value) {
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  void put_weight(std::size_t at, float value) {
    if (formats_.weights == WeightFormat::kFp32) return put(weight_, at, value);
    put(weight_, at, testing::to_bf16(value));
    if (formats_.weights == WeightFormat::kBf16Split) low_[at] = static_cast<std::int16_t>(bits_of(value));
  }
  void put_gradient(std::size_t at, float value) {
    if (formats_.weights == WeightFormat::kFp32) return put(gradient_, at, value);
    put(gradient_, at, testing::to_bf16(value));
  }
  void put_moment(Bytes& moments, std::size_t at, float value, std::uint64_t random) {
    switch (formats_.moments) {
      case MomentFormat::kFp32:
        return put(moments, at, value);
      case MomentFormat::kBf16:
        return put(moments, at, testing::to_bf16(value));
      case MomentFormat::kInt8:
        return put(moments, at, static_cast<std::uint8_t>(random % 5 == 0 ? 0 : random >> 8));
    }
  }
  MomentSpan moment_span(Moment moment) {
    const UpdateSpan all = span();
    const bool first = moment == Moment::kExpAvg;
    return {moment, formats_.moments, first ? all.exp_avg : all.exp_avg_sq,
            first ? all.exp_avg_exponents : all.exp_avg_sq_exponents, all.count};
  }

  Formats formats_;
  std::size_t count_, offset_;
  std::int64_t first_;
  Bytes weight_, gradient_, exp_avg_, exp_avg_sq_;
  std::vector<std::int16_t> low_;
  std::vector<std::uint8_t>
      exponents_;  // a guard, the first moments', a guard ..., the second ones', a guard
};

}  // namespace megatrain::testing
