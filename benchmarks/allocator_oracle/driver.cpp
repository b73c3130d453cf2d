// Carries out calls on the caching allocator of libc10_cuda.so, one per line of standard input as recording.py words them,
// and answers each with a line: the address, "oom" or the call's letter, the statistics, and where new segments lie. A
// call that asks for the history is answered with JSON, named as torch.cuda.memory._snapshot() and memory_stats() do.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <iostream>
#include <map>
#include <vector>

extern "C" {
void stub_finish(cudaStream_t stream);
const std::vector<uintptr_t>* stub_segments();
}
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}

namespace {

using c10::cuda::CUDACachingAllocator::CUDAAllocator;

cudaStream_t stream_of(uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); }

void print_statistics(CUDAAllocator* allocator) {
  const auto found = allocator->getDeviceStats(0);
  for (const auto* figures :
       {&found.allocated_bytes, &found.active_bytes, &found.requested_bytes, &found.reserved_bytes, &found.segment,
        &found.inactive_split, &found.inactive_split_bytes}) {
    std::cout << ' ' << (*figures)[0].current << ' ' << (*figures)[0].peak;
  }
  for (const auto count : {found.num_alloc_retries, found.num_ooms, found.num_sync_all_streams, found.num_device_alloc,
                           found.num_device_free, found.oversize_allocations.current, found.oversize_segments.current}) {
    std::cout << ' ' << count;
  }
}

// The last argument came with 2.13.
void record_history(auto* allocator) {
  using c10::cuda::CUDACachingAllocator::RecordContext;
  if constexpr (requires { allocator->recordHistory(true, nullptr, 1, RecordContext::NEVER, true, {}); }) {
    allocator->recordHistory(true, nullptr, SIZE_MAX, RecordContext::NEVER, true, {});
  } else {
    allocator->recordHistory(true, nullptr, SIZE_MAX, RecordContext::NEVER, true);
  }
}

void print_history(CUDAAllocator* allocator) {
  static const char* const kActions[] = {"alloc",         "free_requested", "free_completed", "segment_alloc", "segment_free",
                                         "segment_map",   "segment_unmap",  "snapshot",       "oom"};
  const char* separator = "";
  std::cout << "{\"device_traces\": [[";
  const auto snapshot = allocator->snapshot();
  for (const auto& entry : snapshot.device_traces.at(0)) {
    const bool is_oom = entry.action_ == c10::CachingDeviceAllocator::TraceEntry::OOM;
    std::cout << separator << "{\"action\": \"" << kActions[entry.action_] << (is_oom ? "\", \"device_free\": " : "\", \"addr\": ")
              << entry.addr_ << ", \"size\": " << entry.size_ << ", \"stream\": " << reinterpret_cast<uintptr_t>(entry.stream_)
              << ", \"pool_id\": [" << entry.mempool_.first << ", " << entry.mempool_.second << "]}";
    separator = ", ";
  }
  std::cout << "]], \"statistics\": {";
  const auto found = allocator->getDeviceStats(0);
  const std::pair<const char*, const c10::CachingAllocator::StatArray*> figures[] = {
      {"allocation", &found.allocation},
      {"segment", &found.segment},
      {"active", &found.active},
      {"inactive_split", &found.inactive_split},
      {"allocated_bytes", &found.allocated_bytes},
      {"reserved_bytes", &found.reserved_bytes},
      {"active_bytes", &found.active_bytes},
      {"inactive_split_bytes", &found.inactive_split_bytes},
      {"requested_bytes", &found.requested_bytes},
  };
  for (const auto& [name, scopes] : figures) {
    const char* const kScopes[] = {"all", "small_pool", "large_pool"};
    for (int scope = 0; scope < 3; ++scope) {
      const auto& figure = (*scopes)[scope];
      const std::pair<const char*, int64_t> parts[] = {
          {"current", figure.current}, {"peak", figure.peak}, {"allocated", figure.allocated}, {"freed", figure.freed}};
      for (const auto& [part, value] : parts) {
        std::cout << '"' << name << '.' << kScopes[scope] << '.' << part << "\": " << value << ", ";
      }
    }
  }
  std::cout << "\"num_alloc_retries\": " << found.num_alloc_retries << ", \"num_ooms\": " << found.num_ooms
            << ", \"num_sync_all_streams\": " << found.num_sync_all_streams << ", \"num_device_alloc\": "
            << found.num_device_alloc << ", \"num_device_free\": " << found.num_device_free
            << ", \"oversize_allocations.current\": " << found.oversize_allocations.current
            << ", \"oversize_segments.current\": " << found.oversize_segments.current << "}}";
}

void print_new_segments() {
  static size_t num_printed = 0;
  for (; num_printed < stub_segments()->size(); ++num_printed) std::cout << ' ' << (*stub_segments())[num_printed];
}

}  // namespace

int main() {
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(1);
  c10::cuda::CUDACachingAllocator::init(1);
  auto* allocator = c10::cuda::CUDACachingAllocator::allocator.load();
  std::map<long, void*> live;
  char letter;
  long id, option;
  size_t bytes;
  double fraction;
  while (std::cin >> letter) {
    if (letter == 'm') {
      std::cin >> fraction;
      allocator->setMemoryFraction(fraction, 0);
    } else if (letter == 'S') {
      print_history(allocator);
      std::cout << std::endl;
      continue;
    } else if (letter != 'e' && letter != 'H' && letter != 'N') {
      std::cin >> id;
    }
    if (letter == 'a') {
      std::cin >> bytes >> option;
      try {
        live[id] = allocator->raw_alloc_with_stream(bytes, stream_of(option));
        std::cout << reinterpret_cast<uintptr_t>(live[id]);
      } catch (const c10::OutOfMemoryError&) {
        std::cout << "oom";
      }
    } else {
      std::cout << letter;
    }
    if (letter == 'f') {
      allocator->raw_delete(live.at(id));
      live.erase(id);
    } else if (letter == 'r') {
      std::cin >> option;
      c10::DataPtr data(live.at(id), live.at(id), allocator->raw_deleter(), c10::Device(c10::DeviceType::CUDA, 0));
      allocator->recordStream(data, c10::cuda::getStreamFromExternal(stream_of(option), 0));
      data.release_context();
    } else if (letter == 'd') {
      stub_finish(stream_of(id));
    } else if (letter == 'e') {
      allocator->emptyCache();
    } else if (letter == 'H') {
      record_history(allocator);
    } else if (letter == 'N') {
      allocator->snapshot();
    }
    print_statistics(allocator);
    print_new_segments();
    std::cout << std::endl;
  }
}
