// A communicator of ranks that are processes of one machine: a file in /dev/shm, through which numbers are copied a part
// at a time. All ranks take the same steps in the same order; a rank that ended, or left, ends the wait of the others.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace phantom::nccl {

constexpr int kMostRanks = 64;
constexpr size_t kPartBytes = size_t{256} << 10;     // of a rank in one step
constexpr size_t kMessageBytes = size_t{64} << 10;   // of one rank to one other

// What a rank calls. Ranks that meet in a step have to call the same.
struct Call {
  char name[32];
  int type, operation, root;
  uint64_t count;
  bool operator==(const Call&) const = default;
};

// Why a call of a rank cannot be done; all later calls of the communicator fail with the same words.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Counts of steps, of which each rank writes its own: what it gave, and what it has read of all others.
struct Steps { std::atomic<uint64_t> given, read; };
struct Mailbox { std::atomic<uint64_t> sent, received; Call call; };
struct Control { int color, key; };
struct Rank {
  std::atomic<int> process, count, has_left;
  Steps data, control;
  Call call;
  Control said;
};
struct Shared { Rank ranks[kMostRanks]; };

class Comm {
 public:
  Comm(const std::string& name, int count, int rank, int device);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  const std::string name;
  const int count, rank, device;
  std::atomic<bool> is_aborted{false};
  uint64_t num_children = 0;
  void* reserved = nullptr;  // what it takes of the device's memory

  // One step of all: this rank's bytes are `own` (null: it gives none), and `read` is told of each rank's part in turn.
  template <typename Read>
  void step(const Call& call, const void* own, size_t bytes, Read read) {
    give(call, own, bytes);
    for (int each = 0; each < count; ++each) read(each, part(each));
    shared_->ranks[rank].data.read = ++num_steps_;
  }

  // One part of a message; false: the other rank has not come to it yet.
  bool send(int to, const Call& call, const void* from, size_t bytes);
  bool receive(int from, const Call& call, void* to, size_t bytes);

  // What every rank said, by rank: a step beside those of the streams.
  std::vector<Control> exchange(Control own);

  // Waits, a little longer each time, and fails where a rank that has not done its share never will.
  class Wait;
  void leave() { shared_->ranks[rank].has_left = 1; }
  void fail(const std::string& why);
  std::string failure();  // empty: nothing went wrong

 private:
  void give(const Call& call, const void* own, size_t bytes);
  const char* part(int each) const { return parts_ + each * kPartBytes; }
  Mailbox& mailbox(int from, int to) { return mailboxes_[from * count + to]; }
  char* message(int from, int to) { return messages_ + (size_t(from) * count + to) * kMessageBytes; }
  bool is_gone(int each, std::string* how);
  void require_alike(int other, const Call& theirs, const Call& own);

  int file_ = -1;
  size_t bytes_ = 0;
  Shared* shared_ = nullptr;
  Mailbox* mailboxes_ = nullptr;
  char *parts_ = nullptr, *messages_ = nullptr;
  uint64_t num_steps_ = 0, num_exchanges_ = 0;
  std::string failure_;
};

class Comm::Wait {
 public:
  Wait(Comm& comm, const char* what) : comm_(comm), what_(what) {}
  // Rank `each` has not done its share.
  void once_more(int each);

 private:
  Comm& comm_;
  const char* what_;
  int64_t num_tries_ = 0, began_ns_ = 0;
};

}  // namespace phantom::nccl
