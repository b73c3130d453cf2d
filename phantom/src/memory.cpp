// Memory of the phantom device: address space of its own, whose pages come from the host when they are touched first.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <vector>

#include "device.h"

namespace phantom {
namespace {

constexpr size_t kArenaBytes = size_t{1} << 42;  // 4 TiB of addresses for each device, none of them ever handed out twice

struct Arena {
  char* base = nullptr;
  char* cursor = nullptr;
  size_t used_bytes = 0;
  std::map<char*, size_t> mallocs;
};

struct Physical {
  int device;
  size_t bytes;
  int num_users;
};

struct Memory {
  std::vector<Arena> arenas;
  std::map<uint64_t, Physical> physical;
  std::map<char*, std::pair<size_t, uint64_t>> mapped;
  uint64_t next_handle = 1;
  std::map<char*, size_t> pinned;   // by cudaHostAlloc
  std::map<char*, size_t> others;   // by cudaHostRegister

  Memory() {
    for (int device = 0; device < settings().num_devices; ++device) {
      void* wanted = reinterpret_cast<void*>(0x100000000000ULL + device * kArenaBytes);
      void* at = mmap(wanted, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (at == MAP_FAILED) {
        perror("phantom: no address space");
        _exit(2);
      }
      Arena arena;
      arena.base = static_cast<char*>(at);
      arena.cursor = settings().descends ? arena.base + kArenaBytes : arena.base;
      arenas.push_back(arena);
    }
  }
};

Memory* made = nullptr;
Memory& memory() {
  Guard guard(lock());
  if (!made) made = new Memory;
  return *made;
}

std::optional<size_t> changed_others_bytes;

size_t rounded(size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

char* place(Arena& arena, size_t bytes) {
  const size_t span = rounded(bytes);
  if (settings().descends) return arena.cursor -= span;
  char* at = arena.cursor;
  arena.cursor += span;
  return at;
}

bool take(Arena& arena, size_t bytes) {
  if (arena.used_bytes + bytes + settings().context_bytes + others_bytes() > card().total_bytes) return false;
  arena.used_bytes += bytes;
  return true;
}

void open_pages(char* at, size_t bytes) { mprotect(at, bytes, PROT_READ | PROT_WRITE); }

// The pages go back to the system; the addresses stay the arena's.
void close_pages(char* at, size_t bytes) {
  mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

bool covers(const std::map<char*, size_t>& ranges, const void* at) {
  auto found = ranges.upper_bound(static_cast<char*>(const_cast<void*>(at)));
  if (found == ranges.begin()) return false;
  --found;
  return static_cast<const char*>(at) < found->first + found->second;
}

}  // namespace

size_t others_bytes() { return changed_others_bytes.value_or(settings().others_bytes); }

void* allocate(int device, size_t bytes) {
  Guard guard(lock());
  auto& arena = memory().arenas.at(device);
  const size_t span = rounded(bytes);
  if (!take(arena, span)) return nullptr;
  char* at = place(arena, span);
  open_pages(at, span);
  arena.mallocs[at] = span;
  return at;
}

bool free_memory(void* at) {
  finish_all();
  Guard guard(lock());
  for (auto& arena : memory().arenas) {
    const auto found = arena.mallocs.find(static_cast<char*>(at));
    if (found == arena.mallocs.end()) continue;
    arena.used_bytes -= found->second;
    close_pages(found->first, found->second);
    arena.mallocs.erase(found);
    return true;
  }
  return false;
}

size_t free_bytes(int device) {
  Guard guard(lock());
  const size_t held = memory().arenas.at(device).used_bytes + settings().context_bytes + others_bytes();
  return held > card().total_bytes ? 0 : card().total_bytes - held;
}

void* reserve_addresses(int device, size_t bytes) {
  Guard guard(lock());
  return place(memory().arenas.at(device), bytes);
}

void free_addresses(void* at, size_t bytes) { close_pages(static_cast<char*>(at), rounded(bytes)); }

uint64_t create_physical(int device, size_t bytes) {
  Guard guard(lock());
  if (!take(memory().arenas.at(device), bytes)) return 0;
  const uint64_t handle = memory().next_handle++;
  memory().physical[handle] = {device, bytes, 1};
  return handle;
}

void release_physical(uint64_t handle) {
  Guard guard(lock());
  const auto found = memory().physical.find(handle);
  if (found == memory().physical.end() || --found->second.num_users) return;
  memory().arenas.at(found->second.device).used_bytes -= found->second.bytes;
  memory().physical.erase(found);
}

bool map(void* at, size_t bytes, uint64_t handle) {
  Guard guard(lock());
  const auto found = memory().physical.find(handle);
  if (found == memory().physical.end()) return false;
  ++found->second.num_users;
  open_pages(static_cast<char*>(at), bytes);
  memory().mapped[static_cast<char*>(at)] = {bytes, handle};
  return true;
}

bool unmap(void* at, size_t bytes) {
  Guard guard(lock());
  char* begin = static_cast<char*>(at);
  auto& mapped = memory().mapped;
  for (auto each = mapped.lower_bound(begin); each != mapped.end() && each->first < begin + bytes;) {
    close_pages(each->first, each->second.first);
    release_physical(each->second.second);
    each = mapped.erase(each);
  }
  return true;
}

int device_at(const void* at) {
  const auto* each = static_cast<const char*>(at);
  const auto& arenas = memory().arenas;
  for (size_t device = 0; device < arenas.size(); ++device)
    if (each >= arenas[device].base && each < arenas[device].base + kArenaBytes) return static_cast<int>(device);
  return -1;
}

void* allocate_host(size_t bytes) {
  void* at = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  Guard guard(lock());
  memory().pinned[static_cast<char*>(at)] = std::max<size_t>(bytes, 1);
  return at;
}

bool free_host(void* at) {
  finish_all();
  Guard guard(lock());
  const auto found = memory().pinned.find(static_cast<char*>(at));
  if (found == memory().pinned.end()) return false;
  munmap(found->first, found->second);
  memory().pinned.erase(found);
  return true;
}

bool register_host(void* at, size_t bytes) {
  Guard guard(lock());
  if (is_pinned(at)) return false;
  memory().others[static_cast<char*>(at)] = bytes;
  return true;
}

bool unregister_host(void* at) {
  Guard guard(lock());
  return memory().others.erase(static_cast<char*>(at)) > 0;
}

bool is_pinned(const void* at) {
  Guard guard(lock());
  return covers(memory().pinned, at) || covers(memory().others, at);
}

bool has_memory() { return made != nullptr; }

}  // namespace phantom

// Other processes hold so much of each device from now on.
extern "C" void phantom_others_hold(size_t bytes) { phantom::changed_others_bytes = bytes; }
