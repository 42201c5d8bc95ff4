#include "pending.h"

#include <algorithm>
#include <atomic>
#include <mutex>

namespace emu {

namespace {

struct Entry {
  int stream;
  int64_t time;
  PendingPtr work;
};

struct Table {
  std::mutex mutex;
  std::vector<Entry> entries;
};

// Never destroyed: threads that still run at the end of the process use it.
Table& table() {
  static auto* made = new Table;
  return *made;
}

std::atomic<size_t> held{0};

// What failed stays until somebody waits for it, who is told.
void forget_done(Table& t) {
  auto& all = t.entries;
  auto gone = [](const Entry& e) { return e.work->done() && !e.work->failed(); };
  all.erase(std::remove_if(all.begin(), all.end(), gone), all.end());
  held = all.size();
}

bool covers(const Clock& clock, const Entry& entry) {
  auto stream = static_cast<size_t>(entry.stream);
  return stream < clock.size() && clock[stream] >= entry.time;
}

}  // namespace

bool anything_pending() { return held.load(std::memory_order_relaxed) > 0; }

void put_pending(int stream, int64_t time, PendingPtr work) {
  std::lock_guard<std::mutex> lock(table().mutex);
  forget_done(table());
  table().entries.push_back({stream, time, std::move(work)});
  held = table().entries.size();
}

void forget_pending(const PendingPtr& work) {
  std::lock_guard<std::mutex> lock(table().mutex);
  auto& all = table().entries;
  auto is = [&](const Entry& e) { return e.work == work; };
  all.erase(std::remove_if(all.begin(), all.end(), is), all.end());
  held = all.size();
}

std::vector<PendingPtr> pending_in(const Clock& clock) {
  std::lock_guard<std::mutex> lock(table().mutex);
  forget_done(table());
  std::vector<PendingPtr> works;
  for (auto& entry : table().entries)
    if (covers(clock, entry)) works.push_back(entry.work);
  return works;
}

void await_clock(const Clock& clock) {
  for (auto& work : pending_in(clock)) {
    // A failure is told once: cleaning up after it must be possible.
    struct Forget {
      const PendingPtr& work;
      ~Forget() { forget_pending(work); }
    } forget_it{work};
    work->wait();
  }
}

bool clock_done(const Clock& clock) {
  auto works = pending_in(clock);
  return std::all_of(works.begin(), works.end(), [](auto& work) { return work->done(); });
}

}  // namespace emu
