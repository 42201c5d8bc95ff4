#include "link.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include "device.h"

namespace emu {

namespace {

using namespace std::chrono_literals;
using Clocks = std::chrono::steady_clock;

// An abort is noticed this soon, and peers learn what a rank waits in after this.
constexpr auto kSlice = 50ms;
constexpr auto kSlow = 200ms;

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds limit) {
  timespec time{limit.count() / 1000000000, limit.count() % 1000000000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

size_t up(size_t n) { return (n + 4095) / 4096 * 4096; }

std::string new_path() {
  static std::atomic<int> number{0};
  static const std::string folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  auto now = Clocks::now().time_since_epoch().count();
  return c10::str(folder, "/emulated-nccl-", getpid(), "-", number++, "-", now);
}

// Ended, whether or not its parent has asked how.
bool gone(int process) {
  std::ifstream file(c10::str("/proc/", process, "/stat"));
  std::string text;
  if (!std::getline(file, text)) return true;
  const size_t name_ends = text.rfind(") ");
  return name_ends != std::string::npos && (text[name_ends + 2] == 'Z' || text[name_ends + 2] == 'X');
}

const char* reduce_name(int op) {
  static const char* names[] = {"sum", "avg", "product", "min", "max"};
  return op >= 0 && op < 5 ? names[op] : "?";
}

// Every link of this process, so that each can tell its peers what the process waits in.
struct Links {
  std::mutex mutex;
  std::set<Link*> all;
  std::map<const Link*, std::string> waiting;
};
Links& links() {
  static auto* made = new Links;
  return *made;
}

}  // namespace

// ---- calls ---------------------------------------------------------------------------------------

bool CallInfo::same_call(const CallInfo& o) const {
  return std::strcmp(name, o.name) == 0 && number == o.number && numel_in == o.numel_in &&
      numel_out == o.numel_out && root == o.root && dtype == o.dtype && reduce == o.reduce;
}

std::string CallInfo::text() const {
  std::string out = c10::str("#", number, " ", name);
  if (reduce >= 0) out += c10::str("(", reduce_name(reduce), ")");
  if (dtype >= 0) {
    out += " of ";
    if (numel_in >= 0) out += c10::str(numel_in, " ");
    out += c10::toString(static_cast<c10::ScalarType>(dtype));
    if (numel_out >= 0 && numel_out != numel_in) out += c10::str(" into ", numel_out);
  }
  if (root >= 0) out += c10::str(", root ", root);
  return out;
}

// ---- what lies in the file -----------------------------------------------------------------------

struct alignas(64) Link::Seat {
  std::atomic<uint32_t> bell;      // rung by who changed what this rank may be waiting for
  std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> here;
  std::atomic<uint64_t> round;     // rounds shown
  int32_t process;
  char gpu[128];
  CallInfo call[2];                // by parity of the round that began it
  uint32_t shown[2];
  CallInfo last;                   // for reports: the last call that this rank was asked for
  char doing[1024];                // for reports: what its process has been waiting in for a while
};

// From one rank to one other. Numbers only grow; each is written by one side.
struct alignas(64) Link::Wire {
  struct Label {
    int64_t numel;
    int16_t dtype;
  };
  std::atomic<uint32_t> offered;  // letters, by the sender
  std::atomic<uint32_t> wanted;   // letters, by the receiver
  std::atomic<uint64_t> written;  // parcels
  std::atomic<uint64_t> taken;
  Label sent, expected;           // of the newest letter
  uint32_t length[2];             // of the parcels under way
};

Link::Seat& Link::seat(int rank) const { return reinterpret_cast<Seat*>(base_)[rank]; }

Link::Wire& Link::wire(int from, int to) const {
  auto* first = reinterpret_cast<Wire*>(base_ + up(o_.size * sizeof(Seat)));
  return first[from * o_.size + to];
}

char* Link::window_at(int rank, int parity) const {
  size_t n = o_.size;
  return base_ + up(n * sizeof(Seat)) + up(n * n * sizeof(Wire)) + (2 * rank + parity) * kWindow;
}

char* Link::parcel_at(int from, int to, int parity) const {
  return window_at(o_.size, 0) + (2 * (from * o_.size + to) + parity) * kParcel;
}

// ---- connecting ----------------------------------------------------------------------------------

Link::Link(c10d::Store& store, LinkOptions options)
    : o_(std::move(options)), sent_(o_.size), received_(o_.size) {
  deadline_ = Clocks::now() + o_.timeout;
  const std::string key = "emulated-nccl/" + o_.key;
  if (o_.rank == 0) {
    auto path = new_path();
    map(path, true);
    store.set(key, path);
  } else {
    std::string path;
    try {
      store.wait({key}, o_.timeout);
      path = store.get_to_str(key);
    } catch (const std::exception& error) {
      C10_THROW_ERROR(DistBackendError, c10::str(
          "[", who(o_.rank), "] is setting up NCCL communicator and retrieving ncclUniqueId from [",
          who(0), "] via c10d key-value store by key '", o_.key, "', but store->get('", o_.key,
          "') got error: ", error.what()));
    }
    map(path, false);
  }
  meet();
  refuse_duplicates();
  std::lock_guard<std::mutex> lock(links().mutex);
  links().all.insert(this);
}

Link::~Link() {
  {
    std::lock_guard<std::mutex> lock(links().mutex);
    links().all.erase(this);
    links().waiting.erase(this);
  }
  munmap(base_, bytes_);
}

void Link::map(const std::string& path, bool create) {
  bytes_ = parcel_at(o_.size, 0, 0) - base_;
  int file = open(path.c_str(), create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
  TORCH_CHECK_WITH(
      DistBackendError, file >= 0 && (!create || ftruncate(file, bytes_) == 0),
      "NCCL error: cannot open the communicator ", path, " that the store names under '", o_.key,
      "': the store still knows one that is gone (emulated)");
  void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(data != MAP_FAILED, "cannot map ", path);
  base_ = static_cast<char*>(data);
  path_ = path;
}

void Link::meet() {
  Seat& mine = seat(o_.rank);
  mine.process = getpid();
  std::strncpy(mine.gpu, o_.gpu.c_str(), sizeof(mine.gpu) - 1);
  mine.here = 1;
  for (int r = 0; r < o_.size; ++r) ring(r);
  auto all_here = [this] {
    for (int r = 0; r < o_.size; ++r)
      if (!seat(r).here) return false;
    return true;
  };
  try {
    await(all_here);
  } catch (const std::exception& error) {
    std::string absent;
    for (int r = 0; r < o_.size; ++r)
      if (!seat(r).here) absent += (absent.empty() ? "" : ", ") + who(r);
    unlink(path_.c_str());
    munmap(base_, bytes_);
    C10_THROW_ERROR(DistBackendError, c10::str(
        "NCCL error: ", who(o_.rank), " of group '", o_.group, "' makes communicator '", o_.key,
        "' and waited ", o_.timeout.count(), " ms in vain for ", absent, " (emulated)"));
  }
  // Every rank has it mapped: no name is left behind, however the processes end.
  unlink(path_.c_str());
}

void Link::refuse_duplicates() const {
  for (int i = 0; i < o_.size; ++i)
    for (int j = 0; j < i; ++j)
      TORCH_CHECK_WITH(
          DistBackendError, std::strcmp(seat(i).gpu, seat(j).gpu) != 0,
          "NCCL error: invalid usage: Duplicate GPU detected : rank ", i, " and rank ", j,
          " both on CUDA device ", seat(i).gpu, " (emulated)");
}

// ---- waiting -------------------------------------------------------------------------------------

void Link::ring(int rank) const {
  Seat& to = seat(rank);
  to.bell.fetch_add(1);
  if (to.sleeping) futex_wake(to.bell);
}

void Link::await(const std::function<bool()>& ready) {
  Seat& mine = seat(o_.rank);
  const auto began = Clocks::now();
  bool told = false;
  struct Tidy {
    Link& link;
    bool& told;
    ~Tidy() {
      link.seat(link.o_.rank).sleeping = 0;
      if (told) tell_peers(&link, "");
    }
  } tidy{*this, told};
  while (true) {
    mine.sleeping = 1;  // before the bell is read, so that no ring is lost
    const uint32_t seen = mine.bell;
    if (ready()) return;
    if (*o_.aborted) throw Aborted("NCCL communicator was aborted on " + who(o_.rank) + ".");
    const auto now = Clocks::now();
    if (deadline_ && now > *deadline_) {
      told = false;  // and it still waits, as a GPU does: peers are told so
      throw TimedOut(report());
    }
    if (!told && now - began > kSlow) {
      told = true;
      tell_peers(this, c10::str("group '", o_.group, "' ", call_.text()));
    }
    futex_wait(mine.bell, seen, kSlice);
  }
}

// ---- reports -------------------------------------------------------------------------------------

std::string Link::who(int rank) const {
  return c10::str("rank ", o_.names.empty() ? rank : o_.names[rank]);
}

void Link::write_doing(const std::string& text) {
  Seat& mine = seat(o_.rank);
  std::strncpy(mine.doing, text.c_str(), sizeof(mine.doing) - 1);
}

void Link::tell_peers(const Link* link, const std::string& text) {
  std::lock_guard<std::mutex> lock(links().mutex);
  if (text.empty())
    links().waiting.erase(link);
  else
    links().waiting[link] = text;
  std::string all;
  for (auto& [_, one] : links().waiting) all += (all.empty() ? "" : "; ") + one;
  for (auto* one : links().all) one->write_doing(all);
}

std::string Link::report() const {
  std::string out = c10::str(who(o_.rank), " waits in group '", o_.group, "' ", call_.text(), ".");
  {
    std::lock_guard<std::mutex> lock(links().mutex);
    for (auto& [link, text] : links().waiting)
      if (link != this) out += " It waits in " + text + " too.";
  }
  for (int r = 0; r < o_.size; ++r) {
    if (r == o_.rank) continue;
    const Seat& s = seat(r);
    out += "\n  " + who(r);
    if (gone(s.process))
      out += c10::str(" is gone (process ", s.process, ")");
    else if (s.doing[0])
      out += c10::str(" waits in ", s.doing);
    else
      out += " is alive and does not wait for this group";
    if (s.last.number > 0)
      out += c10::str("; its last call here was ", s.last.text());
    else
      out += "; it has called nothing here";
  }
  return out;
}

void Link::enqueued(const CallInfo& call) { seat(o_.rank).last = call; }

// ---- rounds --------------------------------------------------------------------------------------

void Link::begin(const CallInfo& call, std::optional<Instant> deadline) {
  call_ = call;
  deadline_ = deadline;
  first_round_ = true;
}

void Link::next(CallInfo call) {
  call.number = call_.number;
  call_ = call;
  first_round_ = true;
}

void Link::show(const void* bytes, size_t n) {
  TORCH_INTERNAL_ASSERT(n <= kWindow);
  const int parity = ++round_ & 1;
  Seat& mine = seat(o_.rank);
  if (n) std::memcpy(window_at(o_.rank, parity), bytes, n);
  mine.shown[parity] = n;
  mine.call[parity] = call_;
  mine.round = round_;
  for (int r = 0; r < o_.size; ++r)
    if (r != o_.rank) ring(r);
  await([this] {
    for (int r = 0; r < o_.size; ++r)
      if (seat(r).round < round_) return false;
    return true;
  });
  if (std::exchange(first_round_, false)) compare_calls();
}

const char* Link::window(int rank) const { return window_at(rank, round_ & 1); }
size_t Link::shown(int rank) const { return seat(rank).shown[round_ & 1]; }

void Link::compare_calls() const {
  const int parity = round_ & 1;
  bool same = true;
  for (int r = 0; r < o_.size; ++r) same = same && seat(r).call[parity].same_call(call_);
  if (same) return;
  std::string all;
  for (int r = 0; r < o_.size; ++r)
    all += c10::str("\n  ", who(r), " called ", seat(r).call[parity].text());
  throw Mismatch(c10::str(
      "NCCL: the ranks of group '", o_.group,
      "' called different operations; on GPUs this hangs or corrupts memory (emulated):", all));
}

// ---- letters -------------------------------------------------------------------------------------

// One letter on its way; step() does what can be done without waiting.
class Link::Post {
 public:
  Post(Link& link, const Letter& letter)
      : link_(link), letter_(letter),
        wire_(letter.sends ? link.wire(link.rank(), letter.peer) : link.wire(letter.peer, link.rank())),
        number_(++(letter.sends ? link.sent_ : link.received_)[letter.peer]) {}

  bool finished() const { return stage_ == kFinished; }
  const Wire* wire() const { return &wire_; }
  bool sends() const { return letter_.sends; }

  bool step() {
    switch (stage_) {
      case kNew: return announce();
      case kAnnounced: return agree();
      case kMoving: return letter_.sends ? write() : take();
      case kFinished: return false;
    }
    return false;
  }

 private:
  enum Stage { kNew, kAnnounced, kMoving, kFinished };

  bool announce() {
    // The receiver has read the label of the letter before this once it has taken its last parcel.
    if (letter_.sends && wire_.written != wire_.taken) return false;
    auto& label = letter_.sends ? wire_.sent : wire_.expected;
    label.numel = letter_.numel;
    label.dtype = letter_.dtype;
    (letter_.sends ? wire_.offered : wire_.wanted) = number_;
    link_.ring(letter_.peer);
    stage_ = kAnnounced;
    return true;
  }

  // Nothing is sent before the receiver asked for it.
  bool agree() {
    if ((letter_.sends ? wire_.wanted : wire_.offered) < number_) return false;
    const auto sent = wire_.sent, expected = wire_.expected;
    if (sent.numel != expected.numel || sent.dtype != expected.dtype) {
      const int from = letter_.sends ? link_.rank() : letter_.peer;
      const int to = letter_.sends ? letter_.peer : link_.rank();
      auto text = [](const Wire::Label& l) {
        return c10::str(l.numel, " ", c10::toString(static_cast<c10::ScalarType>(l.dtype)));
      };
      throw Mismatch(c10::str(
          "NCCL: ", link_.who(from), " of group '", link_.o_.group, "' sends ", text(sent), " where ",
          link_.who(to), " receives ", text(expected), " (message ", number_,
          " of this pair); on GPUs this hangs or corrupts memory (emulated)"));
    }
    stage_ = kMoving;
    return true;
  }

  bool write() {
    const uint64_t written = wire_.written;
    if (written - wire_.taken >= 2) return false;
    const size_t n = std::min<size_t>(kParcel, letter_.size - moved_);
    auto* to = link_.parcel_at(link_.rank(), letter_.peer, written & 1);
    if (n) std::memcpy(to, static_cast<char*>(letter_.bytes) + moved_, n);
    wire_.length[written & 1] = n;
    wire_.written = written + 1;
    return moved(n);
  }

  bool take() {
    const uint64_t taken = wire_.taken;
    if (wire_.written <= taken) return false;
    const size_t n = wire_.length[taken & 1];
    auto* from = link_.parcel_at(letter_.peer, link_.rank(), taken & 1);
    if (n) std::memcpy(static_cast<char*>(letter_.bytes) + moved_, from, n);
    wire_.taken = taken + 1;
    return moved(n);
  }

  // An empty letter is one empty parcel: the other side's label has then been read.
  bool moved(size_t n) {
    moved_ += n;
    if (moved_ == static_cast<size_t>(letter_.size)) stage_ = kFinished;
    link_.ring(letter_.peer);
    return true;
  }

  Link& link_;
  const Letter letter_;
  Wire& wire_;
  const uint32_t number_;
  size_t moved_ = 0;
  Stage stage_ = kNew;
};

void Link::exchange(const std::vector<Letter>& letters) {
  std::vector<Post> posts;
  posts.reserve(letters.size());
  for (auto& letter : letters) posts.emplace_back(*this, letter);
  await([&] {
    for (bool moved = true; moved;) {
      moved = false;
      // The first unfinished letter of each wire and side; the others wait behind it.
      std::set<std::pair<const Wire*, bool>> busy;
      for (auto& post : posts) {
        if (post.finished() || !busy.insert({post.wire(), post.sends()}).second) continue;
        while (post.step()) moved = true;
      }
    }
    return std::all_of(posts.begin(), posts.end(), [](auto& p) { return p.finished(); });
  });
}

}  // namespace emu
