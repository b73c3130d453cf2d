// The model of time. Nothing here takes as long as it says: the host's clock moves by what launches and waits take, each
// engine of a device (its multiprocessors, a copy engine each way) does one thing at a time, and work begins when its
// stream has come to it, its engine has a gap, and the host has launched it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "device.h"

namespace phantom {
namespace {

constexpr int64_t kCopyLatencyNs = 2000;
// What a gap before this may hold is forgotten: the host was past it long ago.
constexpr size_t kMostIntervals = 4096;

int64_t now = 0;
struct Interval { int64_t begin_ns, end_ns; };
std::map<std::pair<int, Engine>, std::vector<Interval>>& engines() {
  static auto* made = new std::map<std::pair<int, Engine>, std::vector<Interval>>;
  return *made;
}

struct Entry {
  int device;
  Engine engine;
  std::string name;
  Interval when;
};
std::vector<Entry>& timeline() {
  static auto* made = new std::vector<Entry>;
  return *made;
}
bool keeps_timeline = false;

// What this machine itself took since the last look counts on the clock as well, as far as PHANTOM_HOST_SHARE says.
void look_at_host() {
  if (settings().host_share <= 0) return;
  static auto last = std::chrono::steady_clock::now();
  const auto here = std::chrono::steady_clock::now();
  now += static_cast<int64_t>(settings().host_share * std::chrono::duration<double, std::nano>(here - last).count());
  last = here;
}

}  // namespace

int64_t host_ns() { Guard guard(lock()); look_at_host(); return now; }

void pass_host_time(int64_t until_ns) {
  Guard guard(lock());
  look_at_host();
  now = std::max(now, until_ns);
}

void launched() { Guard guard(lock()); look_at_host(); now += settings().launch_ns; }

int64_t copy_ns(size_t bytes, CopyKind kind) {
  // A copy on the device reads and writes.
  const double speed = kind == CopyKind::kOnDevice ? card().memory_bytes_per_second / 2 : card().link_bytes_per_second;
  return kCopyLatencyNs + static_cast<int64_t>(static_cast<double>(bytes) / speed * 1e9);
}

int64_t placed(int device, Engine engine, int64_t ready_ns, int64_t duration_ns, const char* name) {
  Guard guard(lock());
  int64_t begin = std::max(ready_ns, now);
  if (engine != Engine::kNone && duration_ns > 0) {
    auto& busy = engines()[{device, engine}];
    auto next = std::lower_bound(busy.begin(), busy.end(), begin, [](auto& i, int64_t at) { return i.end_ns <= at; });
    for (; next != busy.end() && next->begin_ns < begin + duration_ns; ++next) begin = next->end_ns;
    busy.insert(next, {begin, begin + duration_ns});
    if (busy.size() > kMostIntervals) busy.erase(busy.begin(), busy.begin() + kMostIntervals / 2);
    if (keeps_timeline) timeline().push_back({device, engine, name ? name : "", {begin, begin + duration_ns}});
  }
  return begin + duration_ns;
}

}  // namespace phantom

extern "C" {

int64_t phantom_host_ns() { return phantom::host_ns(); }
void phantom_pass_host_ns(int64_t ns) { phantom::pass_host_time(phantom::host_ns() + ns); }

void phantom_keep_timeline(int keep) {
  phantom::Guard guard(phantom::lock());
  phantom::keeps_timeline = keep != 0;
  phantom::timeline().clear();
}

// Writes "device<tab>engine<tab>begin<tab>end<tab>name" lines; returns the bytes that all of them need.
size_t phantom_timeline(char* text, size_t size) {
  phantom::Guard guard(phantom::lock());
  constexpr const char* kNames[] = {"compute", "to device", "to host", "none"};
  std::string all;
  for (const auto& each : phantom::timeline())
    all += std::to_string(each.device) + "\t" + kNames[static_cast<int>(each.engine)] + "\t" +
           std::to_string(each.when.begin_ns) + "\t" + std::to_string(each.when.end_ns) + "\t" + each.name + "\n";
  if (text && size) snprintf(text, size, "%s", all.c_str());
  return all.size() + 1;
}
}
