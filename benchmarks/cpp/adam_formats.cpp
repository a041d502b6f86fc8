#include "adam_formats.h"

#include <bit>
#include <cmath>

#include "memory_passes.h"
#include "optim/adamw.h"
#include "tiles/share.h"
#include "tiles/tile_layout.h"

namespace megatrain::bench {
namespace {

constexpr AdamWStep kStep{.lr = 1e-5, .step = 100};

// FNV-1a over 32-bit words.
template <class T>
std::uint64_t digest_of(const T* values, ElementRange range, std::uint64_t digest) {
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    std::uint32_t word = 0;
    if constexpr (sizeof(T) == 4) {
      word = std::bit_cast<std::uint32_t>(values[i]);
    } else {
      word = static_cast<std::uint16_t>(values[i]);
    }
    digest = (digest ^ word) * 0x100000001b3u;
  }
  return digest;
}

constexpr std::uint64_t kDigestBegin = 0xcbf29ce484222325u;

}  // namespace

std::size_t AdamMemory::bytes(std::int64_t parameters) {
  return static_cast<std::size_t>(parameters) * (3 * 2 + 4 * 4) + 7 * 4096;
}

AdamMemory::AdamMemory(std::int64_t parameters, const std::vector<int>& nodes, ThreadPool& pool)
    : parameters_(parameters), memory_(bytes(parameters), nodes) {
  memory_.touch(pool);
  Carver sections(memory_.data());
  high_ = sections.take<std::uint16_t>(parameters);
  low_ = sections.take<std::int16_t>(parameters);
  gradient_ = sections.take<std::uint16_t>(parameters);
  exp_avg_ = sections.take<float>(parameters);
  exp_avg_sq_ = sections.take<float>(parameters);
  weight_ = sections.take<float>(parameters);
  float_gradient_ = sections.take<float>(parameters);

  formats_.push_back(
      {format_name(TileFormat::kBf16Split), 26,
       [this](Isa isa, ElementRange r) {
         static_cast<void>(adamw(isa, kStep,
                                 AdamWSplitSpan{high_ + r.begin, low_ + r.begin, gradient_ + r.begin,
                                                exp_avg_ + r.begin, exp_avg_sq_ + r.begin, r.size()}));
       },
       [this](ElementRange r) {
         pass_mix(SplitMix{high_ + r.begin, reinterpret_cast<std::uint16_t*>(low_) + r.begin,
                           gradient_ + r.begin, exp_avg_ + r.begin, exp_avg_sq_ + r.begin, r.size()},
                  {});
       },
       [this](ElementRange r) {
         std::uint64_t digest = digest_of(high_, r, kDigestBegin);
         digest = digest_of(low_, r, digest);
         digest = digest_of(exp_avg_, r, digest);
         return digest_of(exp_avg_sq_, r, digest);
       }});
  formats_.push_back({format_name(TileFormat::kFp32), 28,
                      [this](Isa isa, ElementRange r) {
                        static_cast<void>(
                            adamw(isa, kStep,
                                  AdamWFloatSpan{weight_ + r.begin, float_gradient_ + r.begin,
                                                 exp_avg_ + r.begin, exp_avg_sq_ + r.begin, r.size()}));
                      },
                      [this](ElementRange r) {
                        pass_mix(FloatMix{weight_ + r.begin, float_gradient_ + r.begin, exp_avg_ + r.begin,
                                          exp_avg_sq_ + r.begin, r.size()},
                                 {});
                      },
                      [this](ElementRange r) {
                        std::uint64_t digest = digest_of(weight_, r, kDigestBegin);
                        digest = digest_of(exp_avg_, r, digest);
                        return digest_of(exp_avg_sq_, r, digest);
                      }});
  reset(pool);
}

void AdamMemory::reset(ThreadPool& pool) {
  over_parameters(pool, parameters_, [this](ElementRange r) {
    for (std::int64_t i = r.begin; i < r.end; ++i) {
      const float wave =
          std::bit_cast<float>(0x3f800000u | (static_cast<std::uint32_t>(i) * 2654435761u >> 9)) - 1.5f;
      weight_[i] = 0.1f * wave;
      float_gradient_[i] = 0.01f * wave;
      exp_avg_[i] = 0.005f * wave;
      exp_avg_sq_[i] = 1e-4f * wave * wave + 1e-8f;
      gradient_[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(float_gradient_[i]) >> 16);
    }
    static_cast<void>(split_master(weight_ + r.begin, high_ + r.begin, low_ + r.begin, r.size()));
  });
}

void over_parameters(ThreadPool& pool, std::int64_t parameters,
                     const std::function<void(ElementRange)>& body) {
  pool.run([&](unsigned worker, unsigned workers) {
    const ElementRange mine = share_of(parameters, page_elements(TileFormat::kBf16Split),
                                       static_cast<int>(worker), static_cast<int>(workers));
    if (!mine.empty()) body(mine);
  });
}

}  // namespace megatrain::bench
