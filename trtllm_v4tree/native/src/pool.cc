#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace v4tree {

namespace {

constexpr int64_t kMaxTasks = 1 << 15;
constexpr int64_t kShortestRest = 8, kLongestRest = 512;  // calls
constexpr std::chrono::microseconds kPrompt{100};  // a worker that waits on its core comes within one; one that sleeps, in fifty
constexpr std::chrono::microseconds kLate{100};  // members wait for each other for microseconds

// How many microseconds an idle worker waits on its core. Longer than the host works between two passes, it need not be woken; but it
// keeps a server and its clients off that core: benchmarks/serving/batching.md.
std::atomic<int> patience{1000};

int processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

struct Team {
  void (*body)(void*, int64_t, int64_t);
  void* argument;
  std::atomic<int64_t> size;

  static void sit(void* user, int64_t seat) {
    Team& team = *static_cast<Team*>(user);
    wait_until([&] { return team.size.load(std::memory_order_acquire) > 0; });
    team.body(team.argument, seat + 1, team.size.load(std::memory_order_relaxed));
  }
};

class Pool {
 public:
  // False, with nothing done, if another caller is being helped.
  bool try_run(int64_t tasks, void (*body)(void*, int64_t), void* argument) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (lock) run(tasks, body, argument);
    return lock.owns_lock();
  }

  // The same with a team: workers claim a seat each and wait until the caller, who is the first member, says how many came in time. Nor if
  // none came, or while teams rest; then the operators of the caller may be helped.
  bool try_team(int64_t wanted, void (*body)(void*, int64_t, int64_t), void* argument) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock || (resting_ > 0 && resting_-- > 0)) return false;
    Team team{body, argument, {0}};
    offer(wanted - 1, wanted - 1, Team::sit, &team);
    const int64_t came = close(wanted - 1);
    if (came == 0) return false;
    late_.store(false, std::memory_order_relaxed);
    began_ = std::chrono::steady_clock::now();
    team.size.store(came + 1, std::memory_order_release);
    body(argument, 0, came + 1);
    wait_in_team([&] { return done_.load(std::memory_order_acquire) >= came; });
    rest_if_late();
    return true;
  }

  void waited(std::chrono::nanoseconds time) {
    if (time > kLate && 4 * time > std::chrono::steady_clock::now() - began_) late_.store(true, std::memory_order_relaxed);
  }

 private:
  // Tasks are claimed from one word (epoch | tasks | next), so a worker that comes late finds another epoch and takes nothing.
  void run(int64_t tasks, void (*body)(void*, int64_t), void* argument) {
    const uint64_t epoch = offer(tasks, std::min<int64_t>(tasks, num_threads()) - 1, body, argument);
    work(epoch);
    wait_until([&] { return done_.load(std::memory_order_acquire) >= tasks; });
  }

  // A member that loses its core keeps all others waiting, where tasks would go to who has time. Then teams rest, for longer each time.
  void rest_if_late() {
    const bool late = late_.load(std::memory_order_relaxed);
    resting_ = late ? rest_ : 0;
    rest_ = late ? std::min(2 * rest_, kLongestRest) : kShortestRest;
  }

  // Lets `workers` threads claim tasks; returns the epoch of the claims.
  uint64_t offer(int64_t tasks, int64_t workers, void (*body)(void*, int64_t), void* argument) {
    body_ = body;
    argument_ = argument;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (claims_.load(std::memory_order_relaxed) >> 32) + 1;
    claims_.store(epoch << 32 | static_cast<uint64_t>(tasks) << 16, std::memory_order_seq_cst);
    start_workers(workers);
    if (asleep_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    return epoch & 0xffffffffu;
  }

  // How many tasks have been claimed when all are or kPrompt is over; no more can be.
  int64_t close(int64_t tasks) {
    const auto since = std::chrono::steady_clock::now();
    uint64_t claim = claims_.load(std::memory_order_acquire);
    for (int spins = 1; static_cast<int64_t>(claim & 0xffff) < tasks; ++spins) {
      relax();
      claim = claims_.load(std::memory_order_acquire);
      if (spins % 64 != 0 || std::chrono::steady_clock::now() - since < kPrompt) continue;
      const uint64_t closed = (claim & ~uint64_t{0xffff}) | static_cast<uint64_t>(tasks);
      if (claims_.compare_exchange_weak(claim, closed, std::memory_order_acq_rel, std::memory_order_acquire)) break;
    }
    return static_cast<int64_t>(claim & 0xffff);
  }

  void work(uint64_t epoch) {
    uint64_t claim = claims_.load(std::memory_order_acquire);
    while (claim >> 32 == epoch && (claim & 0xffff) < (claim >> 16 & 0xffff)) {
      if (!claims_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      body_(argument_, static_cast<int64_t>(claim & 0xffff));
      done_.fetch_add(1, std::memory_order_release);
      claim = claims_.load(std::memory_order_acquire);
    }
  }

  void start_workers(int64_t wanted) {
    try {
      for (; workers_ < wanted; ++workers_) std::thread([this] { wait_for_work(); }).detach();
    } catch (const std::system_error&) {  // the system gives no more threads: fewer do the same work
    }
  }

  void wait_for_work() {
    uint64_t seen = 0;
    for (;;) {
      const auto since = std::chrono::steady_clock::now();
      uint64_t epoch;
      for (int spins = 1; (epoch = claims_.load(std::memory_order_acquire) >> 32) == seen; ++spins) {
        relax();
        if (spins % 256 == 0 && std::chrono::steady_clock::now() - since > std::chrono::microseconds(patience.load(std::memory_order_relaxed))) {
          std::unique_lock<std::mutex> lock(sleep_);
          asleep_.fetch_add(1, std::memory_order_seq_cst);
          wake_.wait(lock, [&] { return claims_.load(std::memory_order_seq_cst) >> 32 != seen; });
          asleep_.fetch_sub(1, std::memory_order_seq_cst);
        }
      }
      seen = epoch;
      work(epoch);
    }
  }

  void (*body_)(void*, int64_t) = nullptr;
  void* argument_ = nullptr;
  std::atomic<uint64_t> claims_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<int> asleep_{0};
  int64_t workers_ = 0, resting_ = 0, rest_ = kShortestRest;
  std::atomic<bool> late_{false};
  std::chrono::steady_clock::time_point began_;
  std::mutex busy_, sleep_;
  std::condition_variable wake_;
};

std::atomic<int> limit{0};
Pool* current = nullptr;

// The pool of this process, never destroyed: its threads live as long as the process. A forked child has none of them, and perhaps
// their locks, so it gets a new pool.
Pool& pool() {
  static const int registered = [] {
    current = new Pool;
    return pthread_atfork(nullptr, nullptr, [] { current = new Pool; });
  }();
  static_cast<void>(registered);
  return *current;
}

}  // namespace

int num_threads() {
  static const int all = processors();
  const int count = limit.load(std::memory_order_relaxed);
  return count > 0 ? count : all;
}

void set_num_threads(int count) { limit.store(count, std::memory_order_relaxed); }

void set_patience(int microseconds) { patience.store(microseconds, std::memory_order_relaxed); }

void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* argument) {
  if (tasks > 1 && tasks < kMaxTasks && num_threads() > 1 && pool().try_run(tasks, body, argument)) return;
  for (int64_t task = 0; task < tasks; ++task) body(argument, task);
}

void team_waited(std::chrono::nanoseconds time) { pool().waited(time); }

void run_team(int64_t wanted, void (*body)(void*, int64_t, int64_t), void* argument) {
  if (wanted > 1 && wanted < kMaxTasks && pool().try_team(wanted, body, argument)) return;
  body(argument, 0, 1);
}

}  // namespace v4tree
