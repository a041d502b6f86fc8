#include "program.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "machine.h"

namespace megatrain::bench {
namespace {

constexpr int kFailed = 1, kWrongArguments = 2, kLacking = 3;

void print_help(const Program& program) {
  std::printf("%s: %s\n\n", program.name, program.summary);
  std::vector<Option> options = program.options;
  options.push_back({"--quick", "", "", "small sizes and few rounds: shows that it works, not how fast"});
  options.push_back({"--json", "FILE", "", "also write the results there"});
  for (const Option& option : options) {
    const std::string left = std::string(option.name) + " " + option.value;
    std::printf("  %-22s %s%s%s%s\n", left.c_str(), option.help, *option.fallback ? " (default: " : "",
                option.fallback, *option.fallback ? ")" : "");
  }
  std::printf("\nExit status: 0 done, 1 failed, 2 wrong arguments, 3 the machine lacks what is measured.\n");
}

// The file of --json: known to be writable before anything is measured, and whole or as it was afterwards.
class JsonFile {
 public:
  explicit JsonFile(const std::string& path) : path_(path), written_(path) {
    if (path.empty()) return;
    std::error_code ignored;
    const auto status = std::filesystem::status(path, ignored);
    // A device or a pipe is written as it is.
    replaces_ = !std::filesystem::exists(status) || std::filesystem::is_regular_file(status);
    if (replaces_) written_ += ".part";
    file_.open(written_);
    if (!file_) throw CallerError("--json " + path + " cannot be written");
  }
  ~JsonFile() {
    std::error_code ignored;
    if (replaces_) std::filesystem::remove(written_, ignored);
  }
  JsonFile(const JsonFile&) = delete;
  JsonFile& operator=(const JsonFile&) = delete;

  void write(const Json& json) {
    if (path_.empty()) return;
    file_ << json.text() << '\n';
    file_.close();
    std::error_code failed;
    if (file_ && replaces_) std::filesystem::rename(written_, path_, failed);
    if (!file_ || failed) throw OutsideError("writing " + path_ + " failed");
  }

 private:
  std::string path_, written_;
  std::ofstream file_;
  bool replaces_ = false;
};

int fail(const Program& program, int status, const char* message) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s\n", program.name, message);
  return status;
}

}  // namespace

Arguments::Arguments(std::vector<Option> options, const std::vector<std::string>& words)
    : options_(std::move(options)) {
  for (const Option& option : options_) values_.emplace_back(option.fallback);
  given_.resize(options_.size());
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--quick") {
      quick_ = true;
      continue;
    }
    if (word == "--help" || word == "-h") {
      help_ = true;
      continue;
    }
    std::string* value = word == "--json" ? &json_path_ : nullptr;
    for (std::size_t o = 0; o < options_.size() && !value; ++o) {
      if (word != options_[o].name) continue;
      value = &values_[o];
      given_[o] = true;
    }
    if (!value) throw CallerError("unknown argument \"" + word + "\" (see --help)");
    if (++i == words.size()) throw CallerError(word + " needs a value");
    *value = words[i];
  }
}

std::size_t Arguments::place(const char* option) const {
  std::size_t i = 0;
  while (std::string(options_.at(i).name) != option) ++i;
  return i;
}

bool Arguments::given(const char* option) const { return given_[place(option)]; }

const std::string& Arguments::text(const char* option) const { return values_[place(option)]; }

std::vector<std::int64_t> Arguments::counts(const char* option, std::int64_t least, std::int64_t most) const {
  std::vector<std::int64_t> counts;
  const std::string& list = text(option);
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string word = list.substr(begin, end - begin);
    const bool digits =
        !word.empty() && word.size() <= 12 && word.find_first_not_of("0123456789") == std::string::npos;
    const std::int64_t count = digits ? std::stoll(word) : -1;
    if (count < least || count > most) {
      throw CallerError(std::string(option) + " is \"" + list + "\"; it takes numbers from " +
                        std::to_string(least) + " to " + std::to_string(most));
    }
    counts.push_back(count);
    begin = end + 1;
  }
  return counts;
}

std::int64_t Arguments::count(const char* option, std::int64_t least, std::int64_t most) const {
  const std::vector<std::int64_t> values = counts(option, least, most);
  if (values.size() != 1) throw CallerError(std::string(option) + " takes one number");
  return values[0];
}

void Report::note(const std::string& line) {
  std::printf("\n%s\n", line.c_str());
  notes_.push(line);
}

void Report::add(const char* key, const Table& table) {
  table.print();
  tables_.set(key, table.json());
}

int run_program(int argc, char** argv, const Program& program) {
  Json json = Json::object();
  json.set("program", program.name).set("megatrain", MEGATRAIN_VERSION);
  try {
    const Arguments arguments(program.options, {argv + 1, argv + argc});
    if (arguments.help()) {
      print_help(program);
      return 0;
    }
    JsonFile file(arguments.json_path());
    json.set("quick", arguments.quick()).set("machine", machine_facts());
    try {
      std::printf("%s: %s\n%s", program.name, program.summary, machine_text().c_str());
      if (arguments.quick()) std::printf("--quick: shows that it works; the figures are not the machine's\n");
      Report report;
      program.body(arguments, report);
      json.set("results", std::move(report.fields_)).set("tables", std::move(report.tables_));
      json.set("notes", std::move(report.notes_));
      file.write(json);
      return 0;
    } catch (const Lacking& lacking) {
      json.set("lacks", lacking.what());
      file.write(json);
      return fail(program, kLacking, lacking.what());
    }
  } catch (const CallerError& error) {
    return fail(program, kWrongArguments, error.what());
  } catch (const std::exception& error) {
    return fail(program, kFailed, error.what());
  }
}

}  // namespace megatrain::bench
