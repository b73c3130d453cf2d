// The phantom device: what the stub libraries share. Memory is address space backed by host pages on demand, work is a
// queue per stream, kernels do nothing unless somebody says what they write, and time is a model.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace phantom {

// -- settings.cpp -----------------------------------------------------------------------------------------------------

// One entry of memwall/data/hardware.toml: build.py writes the table.
struct Card {
  const char* key;
  const char* name;
  size_t total_bytes;
  int major, minor;
  int binary;  // the architecture of torch's kernels that such a card runs, 86 on a card of 8.9
  int num_processors;
  size_t l2_bytes;
  int max_threads, max_blocks;              // per multiprocessor
  size_t shared_bytes, shared_optin_bytes;  // per multiprocessor, per block on request
  double link_bytes_per_second, peer_bytes_per_second, memory_bytes_per_second;
};

// What NVML lists of processes: all with their numbers, this one under another, as in a container, or none.
enum class Listing { kAll, kOtherNumbers, kNobody };
enum class Order { kEager, kLazy, kRandom, kTimed };

struct Settings {
  Card card;
  int num_devices;
  size_t context_bytes;
  bool moves_data;   // copies and memsets between host and device move bytes
  bool descends;     // cudaMalloc hands out falling addresses
  bool drops_waits;  // a control: waits of streams for events are ignored
  Order order;
  uint64_t seed;
  int64_t kernel_ns, launch_ns;
  double host_share;
  size_t others_bytes;
  Listing lists;
  std::string report;

  Settings();
};

const Settings& settings();
inline const Card& card() { return settings().card; }
inline int num_devices() { return settings().num_devices; }
inline size_t context_bytes() { return settings().context_bytes; }
int& current_device();  // of this thread, for the runtime and the driver alike

std::recursive_mutex& lock();
using Guard = std::lock_guard<std::recursive_mutex>;

// The program's own account: PHANTOM_REPORT names a file for it, written when the process ends.
void count(const char* what, const std::string& name);
// A function was called that is generated: it says success and does nothing.
void called_stub(const char* name);
// One was called that would have had to return a size or a pointer: it fails with that status.
long refused(const char* name, long status);

// -- streams.cpp ------------------------------------------------------------------------------------------------------

// Any handle of a stream that an application has: null and the two legacy constants are the default stream.
struct Stream;
struct Event;
Stream* stream_of(void* handle, int device);
Stream* create_stream(int device, int priority);
void destroy_stream(Stream*);
int priority_of(Stream*);
int device_of(Stream*);

enum class CopyKind { kNone, kToDevice, kToHost, kOnDevice, kOnHost };
void copy(Stream*, void* to, const void* from, size_t bytes, CopyKind kind);
void copy_rows(Stream*, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
               CopyKind kind);
void fill(Stream*, void* at, int value, size_t bytes);
void kernel(Stream*, const char* name, int64_t ns = -1);  // -1: as long as the model of time says
// Queues a function; it takes no multiprocessor, and this long.
void call(Stream*, void (*function)(void*), void* data, int64_t ns = 0, const char* name = "call");
void wait_for(Stream*, Event*);
void finish(Stream*);
bool is_done(Stream*);
void finish_all();
// Lets some streams go on, where the order of work is random.
void progress_at_random();

Event* create_event();
void destroy_event(Event*);
void record(Event*, Stream*);
bool is_done(Event*);
void finish(Event*);
// False where one of the two was never recorded.
bool milliseconds_between(Event*, Event*, float*);

bool is_capturing(Stream*);
uint64_t capture_id(Stream*);
void begin_capture(Stream*);
void end_capture(Stream*);

// -- schedule.cpp: the model of time ----------------------------------------------------------------------------------

enum class Engine { kCompute, kToDevice, kToHost, kNone };
int64_t host_ns();               // the host's clock, which moves with calls and waits only
void pass_host_time(int64_t until_ns);
void launched();                 // a call took the host its time
int64_t copy_ns(size_t bytes, CopyKind kind);
// The end of work that could begin at `ready_ns`, in the first gap of its engine that is long enough.
int64_t placed(int device, Engine engine, int64_t ready_ns, int64_t duration_ns, const char* name);

// -- memory.cpp -------------------------------------------------------------------------------------------------------

constexpr size_t kGranule = size_t{2} << 20;
void* allocate(int device, size_t bytes);  // null: the device is full
bool free_memory(void* at);
size_t free_bytes(int device);
size_t others_bytes();  // what other processes hold of each device
void* reserve_addresses(int device, size_t bytes);  // nothing is taken from the device
void free_addresses(void* at, size_t bytes);
uint64_t create_physical(int device, size_t bytes);  // 0: the device is full
void release_physical(uint64_t handle);
bool map(void* at, size_t bytes, uint64_t handle);
bool unmap(void* at, size_t bytes);
int device_at(const void* at);  // -1: no device's
void* allocate_host(size_t bytes);
bool free_host(void* at);
bool register_host(void* at, size_t bytes);  // false: it is pinned already
bool unregister_host(void* at);
bool is_pinned(const void* at);
bool has_memory();  // somebody asked for memory already: settings stay

}  // namespace phantom
