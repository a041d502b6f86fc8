// What every benchmark program is: arguments in; tables on the screen and a JSON file out.
//
// Exit status: 0 done; 1 failed (a copy that did not verify, memory that could not be had); 2 wrong
// arguments; 3 the machine or the build lacks what the program measures, and the message says what.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "json.h"
#include "table.h"

namespace megatrain::bench {

// The machine or the build lacks what is to be measured.
class Lacking : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Option {
  const char* name;      // "--threads"
  const char* value;     // what follows it, in the help
  const char* fallback;  // what counts where it is not given
  const char* help;
};

constexpr std::int64_t kMostThreads = 4096, kMostDevices = 1023;

// Every program also knows --quick, --json FILE and --help.
class Arguments {
 public:
  Arguments(std::vector<Option> options, const std::vector<std::string>& words);

  bool quick() const noexcept { return quick_; }
  bool help() const noexcept { return help_; }
  const std::string& json_path() const noexcept { return json_path_; }
  bool given(const char* option) const;  // and not its fallback
  const std::string& text(const char* option) const;
  std::int64_t count(const char* option, std::int64_t least, std::int64_t most) const;
  std::vector<std::int64_t> counts(const char* option, std::int64_t least,
                                   std::int64_t most) const;  // "1,2,4"; or ""

 private:
  std::size_t place(const char* option) const;

  std::vector<Option> options_;
  std::vector<std::string> values_;
  std::vector<bool> given_;
  bool quick_ = false;
  bool help_ = false;
  std::string json_path_;
};

// Prints each table as it is added, and the rest at the end.
class Report {
 public:
  void note(const std::string& line);  // a sentence on the screen and in the JSON
  void add(const char* key, const Table& table);
  void set(const char* key, Json value) { fields_.set(key, std::move(value)); }

 private:
  friend int run_program(int, char**, const struct Program&);
  Json fields_ = Json::object();
  Json tables_ = Json::object();
  Json notes_ = Json::array();
};

struct Program {
  const char* name;
  const char* summary;
  std::vector<Option> options;
  void (*body)(const Arguments& arguments, Report& report);
};

// The whole of main: returns the exit status.
int run_program(int argc, char** argv, const Program& program);

}  // namespace megatrain::bench
