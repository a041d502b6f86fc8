#include "json.h"

#include <cmath>
#include <cstdio>

namespace megatrain::bench {
namespace {

std::string quoted(std::string_view value) {
  std::string out = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace

Json::Json(double value) : text_("null") {
  if (!std::isfinite(value)) return;
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.6g", value);
  text_ = digits;
}

Json::Json(std::string_view value) : text_(quoted(value)) {}

std::string Json::text(int depth) const {
  if (kind_ == Kind::kScalar) return text_;
  const bool object = kind_ == Kind::kObject;
  std::string out(1, object ? '{' : '[');
  const std::string indent(static_cast<std::size_t>(2 * depth), ' ');
  for (const auto& [key, value] : members_) {
    out += (out.size() > 1 ? ",\n  " : "\n  ") + indent;
    if (object) out += quoted(key) + ": ";
    out += value.text(depth + 1);
  }
  if (!members_.empty()) out += '\n' + indent;
  return out + (object ? '}' : ']');
}

}  // namespace megatrain::bench
