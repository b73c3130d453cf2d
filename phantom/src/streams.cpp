// Streams and events. What is queued on a stream is done in its order, and no sooner than what it waits for: at once,
// when somebody waits for it, at random, or when its modelled time has come (PHANTOM_ORDER).
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "device.h"
#include "gil.h"

namespace phantom {

struct Work {
  enum class Kind { kCopy, kFill, kCall, kWait } kind;
  char* to = nullptr;
  const char* from = nullptr;
  size_t to_pitch = 0, from_pitch = 0, width = 0, rows = 0;
  int value = 0;
  void (*function)(void*) = nullptr;
  void* data = nullptr;
  Stream* other = nullptr;
  uint64_t other_number = 0;
  uint64_t number = 0;
  int64_t end_ns = 0;
};

struct Stream {
  int device, priority;
  int64_t clock_ns = 0;  // the modelled end of all that is queued
  uint64_t num_queued = 0, num_done = 0;
  std::deque<Work> work;
  bool is_capturing = false;
  uint64_t capture_id = 0;
};

struct Event {
  Stream* stream = nullptr;
  uint64_t number = 0;
  int64_t time_ns = 0;
  int polls = 0;
};

namespace {

// Whoever does queued work holds this, and not the lock of the bookkeeping: work may call back into Python.
std::recursive_mutex& doing() {
  static auto* made = new std::recursive_mutex;
  return *made;
}

// In the order in which they were made, so that what is done at random is the same again.
std::vector<Stream*>& streams() {
  static auto* made = new std::vector<Stream*>;
  return *made;
}

// A program that polls for ever would hang where nobody does anything unasked.
constexpr int kMostPolls = 1000;

void complete(Stream* stream, uint64_t number);

void write_value(char* begin, int value, size_t bytes) {
  // Whole pages of zeros are those that were never touched.
  char* end = begin + bytes;
  char* first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + 4095) & ~uintptr_t{4095});
  char* last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) & ~uintptr_t{4095});
  if (value == 0 && first < last && device_at(begin) >= 0) {
    memset(begin, 0, first - begin);
    madvise(first, last - first, MADV_DONTNEED);
    memset(last, 0, end - last);
  } else {
    memset(begin, value, bytes);
  }
}

void execute(const Work& each) {
  switch (each.kind) {
    case Work::Kind::kCopy:
      for (size_t row = 0; row < each.rows; ++row)
        memmove(each.to + row * each.to_pitch, each.from + row * each.from_pitch, each.width);
      break;
    case Work::Kind::kFill:
      write_value(each.to, each.value, each.width);
      break;
    case Work::Kind::kCall:
      each.function(each.data);
      break;
    case Work::Kind::kWait:
      complete(each.other, each.other_number);
      break;
  }
}

// Does the first thing of a stream if its number is not above that one; false: there is no such thing.
bool do_first(Stream* stream, uint64_t number) {
  Work each;
  {
    Guard guard(lock());
    if (stream->work.empty() || stream->work.front().number > number) return false;
    each = stream->work.front();
    stream->work.pop_front();
  }
  execute(each);
  Guard guard(lock());
  stream->num_done = std::max(stream->num_done, each.number);
  return true;
}

void complete(Stream* stream, uint64_t number) {
  {
    Guard guard(lock());
    if (stream->work.empty() && stream->num_done >= number) return;
  }
  WithoutGil without;
  std::lock_guard<std::recursive_mutex> only(doing());
  while (do_first(stream, number)) {
  }
  Guard guard(lock());
  stream->num_done = std::max(stream->num_done, std::min(number, stream->num_queued));
}

// What has become due by itself.
void progress(Stream* stream) {
  if (settings().order == Order::kEager) complete(stream, stream->num_queued);
  if (settings().order != Order::kTimed) return;
  for (;;) {
    uint64_t due = 0;
    {
      Guard guard(lock());
      if (stream->clock_ns <= host_ns()) due = stream->num_queued;
      else if (!stream->work.empty() && stream->work.front().end_ns <= host_ns()) due = stream->work.front().number;
      if (due <= stream->num_done) return;
    }
    complete(stream, due);
  }
}

// Queues what takes this long on an engine, and gives it a number; without work only time and the number pass.
void queue(Stream* stream, Engine engine, int64_t ns, const char* name, const Work* work = nullptr) {
  launched();
  {
    Guard guard(lock());
    stream->clock_ns = placed(stream->device, engine, stream->clock_ns, ns, name);
    ++stream->num_queued;
    if (work) {
      stream->work.push_back(*work);
      stream->work.back().number = stream->num_queued;
      stream->work.back().end_ns = stream->clock_ns;
    }
  }
  progress(stream);
  progress_at_random();
}

std::vector<Stream*> all_streams() {
  Guard guard(lock());
  return streams();
}

}  // namespace

namespace {
std::mt19937_64& generator() {
  static auto* made = new std::mt19937_64(settings().seed);
  return *made;
}
}  // namespace

void progress_at_random() {
  if (settings().order != Order::kRandom) return;
  auto& random = generator();
  static bool is_inside = false;
  WithoutGil without;
  std::lock_guard<std::recursive_mutex> only(doing());
  if (is_inside) return;
  // There are times in which nothing goes on, in which only the stream that was first does, or all but that one, so
  // that one is far behind the others, or far ahead.
  enum Phase { kNothing, kFirst, kOthers, kAll };
  static int phase = kAll, calls_left = 0;
  if (calls_left-- <= 0) {
    phase = static_cast<int>(random() % 4);
    calls_left = static_cast<int>(random() % 48);
  }
  if (phase == kNothing) return;
  is_inside = true;
  while (random() % 4 != 0) {
    std::vector<Stream*> ready;
    {
      Guard guard(lock());
      for (auto* stream : streams()) {
        if ((phase == kFirst && stream != streams().front()) || (phase == kOthers && stream == streams().front())) continue;
        if (stream->work.empty()) {
          // Kernels that write nothing are queued by their number only.
          if (random() % 2) stream->num_done = stream->num_queued;
          continue;
        }
        const Work& first = stream->work.front();
        if (first.kind != Work::Kind::kWait || first.other->num_done >= first.other_number ||
            first.other->work.empty() || first.other->work.front().number > first.other_number)
          ready.push_back(stream);
      }
    }
    if (ready.empty()) break;
    do_first(ready[random() % ready.size()], UINT64_MAX);
  }
  is_inside = false;
}

Stream* stream_of(void* handle, int device) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
  Guard guard(lock());
  static auto* defaults = new std::map<int, Stream*>;
  auto& found = (*defaults)[device];
  if (!found) found = create_stream(device, 0);
  return found;
}

Stream* create_stream(int device, int priority) {
  Guard guard(lock());
  auto* made = new Stream{device, priority};
  streams().push_back(made);
  return made;
}

// A handle may outlive its stream in events, so nothing is freed.
void destroy_stream(Stream* stream) {
  complete(stream, stream->num_queued);
  Guard guard(lock());
  std::erase(streams(), stream);
}

int priority_of(Stream* stream) { return stream->priority; }
int device_of(Stream* stream) { return stream->device; }

void copy_rows(Stream* stream, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
               size_t rows, CopyKind kind) {
  if (kind == CopyKind::kNone) {
    const bool to_device = device_at(to) >= 0, from_device = device_at(from) >= 0;
    kind = to_device ? (from_device ? CopyKind::kOnDevice : CopyKind::kToDevice)
                     : (from_device ? CopyKind::kToHost : CopyKind::kOnHost);
  }
  constexpr const char* kNames[] = {"copy", "copy to device", "copy to host", "copy on device", "copy on host"};
  constexpr Engine kEngines[] = {Engine::kNone, Engine::kToDevice, Engine::kToHost, Engine::kCompute, Engine::kNone};
  const int index = static_cast<int>(kind);
  count("copy", kNames[index]);
  const bool is_pageable =
      (kind == CopyKind::kToDevice && !is_pinned(from)) || (kind == CopyKind::kToHost && !is_pinned(to));
  if (is_pageable) finish(stream);
  const int64_t ns = kind == CopyKind::kOnHost ? 0 : copy_ns(width * rows, kind);
  Work work{Work::Kind::kCopy, static_cast<char*>(to), static_cast<const char*>(from), to_pitch, from_pitch, width, rows};
  if (settings().moves_data || kind == CopyKind::kOnHost) {
    queue(stream, kEngines[index], ns, kNames[index], &work);
  } else if (kind == CopyKind::kToHost) {
    // What was never written reads as zero.
    for (size_t row = 0; row < rows; ++row) {
      const Work zeros{Work::Kind::kFill, static_cast<char*>(to) + row * to_pitch, nullptr, 0, 0, width, 1, 0};
      queue(stream, kEngines[index], row ? 0 : ns, kNames[index], &zeros);
    }
  } else {
    queue(stream, kEngines[index], ns, kNames[index]);
  }
  // What is read from pageable memory has been read, and what is written to it stands there.
  if (is_pageable) finish(stream);
}

void copy(Stream* stream, void* to, const void* from, size_t bytes, CopyKind kind) {
  if (bytes) copy_rows(stream, to, bytes, from, bytes, bytes, 1, kind);
}

void fill(Stream* stream, void* at, int value, size_t bytes) {
  const Work work{Work::Kind::kFill, static_cast<char*>(at), nullptr, 0, 0, bytes, 1, value};
  const bool is_written = settings().moves_data || device_at(at) < 0;
  queue(stream, Engine::kCompute, copy_ns(bytes, CopyKind::kOnDevice), "fill", is_written ? &work : nullptr);
}

namespace {
// Within an operation kernels take nothing by themselves: at its end somebody says what all of them take together.
thread_local bool is_in_operation = false;
thread_local Stream* launched_on = nullptr;
}  // namespace

void kernel(Stream* stream, const char* name, int64_t ns) {
  if (name) count("kernel", name);
  if (ns < 0 && is_in_operation) launched_on = stream;
  queue(stream, Engine::kCompute, ns >= 0 ? ns : is_in_operation ? 0 : settings().kernel_ns, name);
}

void call(Stream* stream, void (*function)(void*), void* data, int64_t ns, const char* name) {
  Work work{Work::Kind::kCall};
  work.function = function;
  work.data = data;
  queue(stream, Engine::kNone, ns, name, &work);
}

void wait_for(Stream* stream, Event* event) {
  if (!event->stream || settings().drops_waits) return;
  Work work{Work::Kind::kWait};
  work.other = event->stream;
  work.other_number = event->number;
  {
    Guard guard(lock());
    stream->clock_ns = std::max(stream->clock_ns, event->time_ns);
  }
  queue(stream, Engine::kNone, 0, "wait", &work);
}

void finish(Stream* stream) {
  pass_host_time(stream->clock_ns);
  complete(stream, stream->num_queued);
}

bool is_done(Stream* stream) {
  launched();
  progress(stream);
  Guard guard(lock());
  return stream->num_done >= stream->num_queued;
}

void finish_all() {
  for (auto* stream : all_streams()) finish(stream);
}

Event* create_event() { return new Event; }
void destroy_event(Event* event) { delete event; }

void record(Event* event, Stream* stream) {
  launched();
  Guard guard(lock());
  stream->clock_ns = std::max(stream->clock_ns, host_ns());
  *event = {stream, ++stream->num_queued, stream->clock_ns, 0};
}

bool is_done(Event* event) {
  if (!event->stream) return true;
  launched();
  // Whoever asks goes on: work that waits for another process, as a collective does, is done by some other thread.
  std::unique_lock<std::recursive_mutex> only(doing(), std::try_to_lock);
  if (!only.owns_lock()) {
    Guard guard(lock());
    return event->stream->num_done >= event->number;
  }
  // On the modelled clock an event happens in its own time, whatever is queued behind it.
  if (settings().order == Order::kTimed && event->time_ns <= host_ns()) complete(event->stream, event->number);
  progress(event->stream);
  bool is_polled_for_ever = false;
  {
    Guard guard(lock());
    // Where nothing that has to be done stands before it, it has happened.
    if (event->stream->num_done >= event->number) return true;
    is_polled_for_ever = ++event->polls > kMostPolls;
  }
  if (is_polled_for_ever) complete(event->stream, event->number);
  return is_polled_for_ever;
}

void finish(Event* event) {
  if (!event->stream) return;
  pass_host_time(event->time_ns);
  complete(event->stream, event->number);
}

bool milliseconds_between(Event* begin, Event* end, float* found) {
  if (!begin->stream || !end->stream) return false;
  *found = static_cast<float>(static_cast<double>(end->time_ns - begin->time_ns) * 1e-6);
  return true;
}

bool is_capturing(Stream* stream) { return stream->is_capturing; }
uint64_t capture_id(Stream* stream) { return stream->capture_id; }

void begin_capture(Stream* stream) {
  static uint64_t next = 0;
  Guard guard(lock());
  stream->is_capturing = true;
  stream->capture_id = ++next;
}

void end_capture(Stream* stream) { stream->is_capturing = false; }

}  // namespace phantom

extern "C" {

// What is launched on this thread until the end belongs to one operation of the program's.
void phantom_begin_operation() {
  phantom::is_in_operation = true;
  phantom::launched_on = nullptr;
}

// Its kernels took so long together, and at least as long as one kernel does; nothing, where it launched none.
void phantom_end_operation(int64_t ns, const char* name) {
  using namespace phantom;
  is_in_operation = false;
  if (!launched_on) return;
  Guard guard(lock());
  const int64_t taken_ns = std::max(ns, settings().kernel_ns);
  launched_on->clock_ns = placed(launched_on->device, Engine::kCompute, launched_on->clock_ns, taken_ns, name);
}

// Queues a function of the program's, as a kernel would be: what it writes is there when its stream has come to it.
void phantom_call(void* stream, int device, void (*function)(void*), void* data) {
  phantom::call(phantom::stream_of(stream, device), function, data);
}

// Begins another random order of work; everything queued is done first.
void phantom_seed(uint64_t seed) {
  phantom::finish_all();
  phantom::generator().seed(seed);
}

void phantom_finish_stream(void* stream, int device) { phantom::finish(phantom::stream_of(stream, device)); }
}
