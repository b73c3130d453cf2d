// Settings of the phantom device, read from the environment when the first call comes, and its account of calls.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>

#include "cards.h"
#include "device.h"

namespace phantom {
namespace {

std::string text(const char* name, const char* otherwise) {
  const char* found = getenv(name);
  return found && *found ? found : otherwise;
}

size_t number(const char* name, size_t otherwise) {
  const char* found = getenv(name);
  return found && *found ? strtoull(found, nullptr, 10) : otherwise;
}

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& known) {
  fprintf(stderr, "phantom: %s=%s is none of: %s\n", name.c_str(), value.c_str(), known.c_str());
  _exit(2);
}

Card card_of_setting() {
  const std::string key = text("PHANTOM_CARD", "h100-80gb");
  std::string known;
  for (const Card& each : kCards) {
    if (key == each.key) return each;
    known += std::string(known.empty() ? "" : ", ") + each.key;
  }
  refuse("PHANTOM_CARD", key, known);
}

Order order_of_setting() {
  const std::string name = text("PHANTOM_ORDER", "eager");
  const std::map<std::string, Order> known = {
      {"eager", Order::kEager}, {"lazy", Order::kLazy}, {"random", Order::kRandom}, {"timed", Order::kTimed}};
  const auto found = known.find(name);
  if (found == known.end()) refuse("PHANTOM_ORDER", name, "eager, lazy, random, timed");
  return found->second;
}

Listing listing_of_setting() {
  const std::string name = text("PHANTOM_NVML", "all");
  const std::map<std::string, Listing> known = {
      {"all", Listing::kAll}, {"numbers", Listing::kOtherNumbers}, {"nobody", Listing::kNobody}};
  const auto found = known.find(name);
  if (found == known.end()) refuse("PHANTOM_NVML", name, "all, numbers, nobody");
  return found->second;
}

Settings* current = nullptr;

using Counts = std::map<std::string, std::map<std::string, size_t>>;
Counts& counts() {
  static auto* made = new Counts;
  return *made;
}

void write_counts() {
  Guard guard(lock());
  FILE* file = fopen((settings().report + "." + std::to_string(getpid())).c_str(), "w");
  if (!file) return;
  for (const auto& [what, names] : counts())
    for (const auto& [name, times] : names) fprintf(file, "%s\t%zu\t%s\n", what.c_str(), times, name.c_str());
  fclose(file);
}

}  // namespace

Settings::Settings()
    : card(card_of_setting()),
      num_devices(static_cast<int>(number("PHANTOM_DEVICES", 1))),
      context_bytes(number("PHANTOM_CONTEXT_BYTES", size_t{500} << 20)),
      moves_data(text("PHANTOM_DATA", text("PHANTOM_NUMBERS", "0") == "1" ? "copy" : "zero") == "copy"),
      descends(text("PHANTOM_ADDRESSES", "up") == "down"),
      drops_waits(text("PHANTOM_DROP_WAITS", "0") == "1"),
      order(order_of_setting()),
      seed(number("PHANTOM_SEED", 0)),
      kernel_ns(static_cast<int64_t>(number("PHANTOM_KERNEL_NS", 5000))),
      launch_ns(static_cast<int64_t>(number("PHANTOM_LAUNCH_NS", 4000))),
      host_share(atof(text("PHANTOM_HOST_SHARE", "0").c_str())),
      others_bytes(number("PHANTOM_OTHERS_BYTES", 0)),
      lists(listing_of_setting()),
      report(text("PHANTOM_REPORT", "")) {
  card.total_bytes = number("PHANTOM_MEMORY_BYTES", card.total_bytes);
}

const Settings& settings() {
  Guard guard(lock());
  if (!current) current = new Settings;
  return *current;
}

int& current_device() {
  static thread_local int device = 0;
  return device;
}

std::recursive_mutex& lock() {
  static auto* made = new std::recursive_mutex;
  return *made;
}

void count(const char* what, const std::string& name) {
  Guard guard(lock());
  if (settings().report.empty()) {
    // Even unasked, what did nothing is kept for whoever asks (phantom_num_stubs).
    if (what == std::string("kernel") || what == std::string("copy") || what == std::string("runtime")) return;
  } else {
    static const bool is_registered = (atexit(write_counts), true);
    (void)is_registered;
  }
  ++counts()[what][name];
}

void called_stub(const char* name) {
  static const bool is_loud = getenv("PHANTOM_VERBOSE") != nullptr;
  count("stub", name);
  if (is_loud) fprintf(stderr, "phantom: %s did nothing\n", name);
}

long refused(const char* name, long status) {
  count("refused", name);
  if (getenv("PHANTOM_VERBOSE")) fprintf(stderr, "phantom: %s is not there and fails\n", name);
  return status;
}

}  // namespace phantom

extern "C" {

// A child process that was forked before anything was allocated may have settings of its own: the next call reads the
// environment again. 0: it did not, since the device has memory in use.
int phantom_read_settings_again() {
  phantom::Guard guard(phantom::lock());
  if (phantom::has_memory()) return 0;
  phantom::current = nullptr;
  return 1;
}

// Writes "what<tab>times<tab>name" lines of the account into `text`; returns the bytes that all of them need.
size_t phantom_account(char* text, size_t size) {
  phantom::Guard guard(phantom::lock());
  std::string all;
  for (const auto& [what, names] : phantom::counts())
    for (const auto& [name, times] : names) all += what + "\t" + std::to_string(times) + "\t" + name + "\n";
  if (text && size) snprintf(text, size, "%s", all.c_str());
  return all.size() + 1;
}

void phantom_count(const char* what, const char* name) { phantom::count(what, name); }
}
