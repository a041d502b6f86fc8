// A JSON value that is built once and written once.
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace megatrain::bench {

class Json {
 public:
  Json() : text_("null") {}
  Json(bool value) : text_(value ? "true" : "false") {}
  Json(std::integral auto value) : text_(std::to_string(value)) {}
  Json(double value);  // null where it is not finite: JSON has no word for it
  Json(const char* value) : Json(std::string_view(value)) {}
  Json(const std::string& value) : Json(std::string_view(value)) {}
  Json(std::string_view value);

  static Json object() { return Json(Kind::kObject); }
  static Json array() { return Json(Kind::kArray); }
  Json& set(std::string key, Json value) {
    members_.emplace_back(std::move(key), std::move(value));
    return *this;
  }
  Json& push(Json value) { return set({}, std::move(value)); }

  std::string text(int depth = 0) const;  // indented, without a newline at the end

 private:
  enum class Kind { kScalar, kObject, kArray };
  explicit Json(Kind kind) : kind_(kind) {}
  Kind kind_ = Kind::kScalar;
  std::string text_;
  std::vector<std::pair<std::string, Json>> members_;  // of an array: with empty keys
};

}  // namespace megatrain::bench
