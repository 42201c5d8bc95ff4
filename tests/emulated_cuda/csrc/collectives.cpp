#include "collectives.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <cstring>

namespace emu {

namespace {

// Up to here every rank sums everything itself: one round instead of two.
constexpr int64_t kSmall = 8192;

template <class T>
void combine(T* to, const T* from, int64_t n, Reduce op) {
  switch (op) {
    case Reduce::kSum:
    case Reduce::kAvg:
      for (int64_t i = 0; i < n; ++i) to[i] = to[i] + from[i];
      break;
    case Reduce::kProduct:
      for (int64_t i = 0; i < n; ++i) to[i] = to[i] * from[i];
      break;
    case Reduce::kMin:
      for (int64_t i = 0; i < n; ++i) to[i] = from[i] < to[i] ? from[i] : to[i];
      break;
    case Reduce::kMax:
      for (int64_t i = 0; i < n; ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
      break;
  }
}

// Elements [first, first + n) of what the ranks show, reduced into `to`.
void reduce_shown(
    const Link& link, char* to, int64_t first, int64_t n, at::ScalarType type, Reduce op) {
  AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, type, "nccl", [&] {
    auto* sum = reinterpret_cast<scalar_t*>(to);
    auto shown = [&](int r) { return reinterpret_cast<const scalar_t*>(link.window(r)) + first; };
    std::memcpy(to, shown(0), n * sizeof(scalar_t));
    for (int r = 1; r < link.size(); ++r) combine(sum, shown(r), n, op);
    if (op == Reduce::kAvg)
      for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] / static_cast<scalar_t>(link.size());
  });
}

int64_t whole(int64_t bytes, int64_t item) { return bytes / item * item; }

}  // namespace

void meet(Link& link) { link.show(nullptr, 0); }

void broadcast(Link& link, Bytes data, int root) {
  int64_t done = 0;
  do {
    const int64_t n = std::min<int64_t>(Link::kWindow, data.size - done);
    link.show(data.data + done, link.rank() == root ? n : 0);
    if (link.rank() != root && n) std::memcpy(data.data + done, link.window(root), n);
    done += n;
  } while (done < data.size);
}

void all_reduce(Link& link, Bytes data, at::ScalarType type, Reduce op) {
  const int64_t item = c10::elementSize(type), ranks = link.size();
  std::vector<char> own;
  int64_t done = 0;
  do {
    const int64_t n = std::min(whole(Link::kWindow, item), data.size - done);
    char* here = data.data + done;
    link.show(here, n);
    if (n <= kSmall) {
      if (n) reduce_shown(link, here, 0, n / item, type, op);
    } else {
      // Each rank sums its part of the window, and shows it.
      const int64_t part = (n / item + ranks - 1) / ranks;
      const int64_t first = std::min(part * link.rank(), n / item);
      const int64_t mine = std::min(part, n / item - first);
      own.resize(mine * item);
      if (mine) reduce_shown(link, own.data(), first, mine, type, op);
      link.show(own.data(), own.size());
      for (int r = 0; r < ranks; ++r)
        if (link.shown(r)) std::memcpy(here + r * part * item, link.window(r), link.shown(r));
    }
    done += n;
  } while (done < data.size);
}

void reduce(Link& link, Bytes data, at::ScalarType type, Reduce op, int root) {
  const int64_t item = c10::elementSize(type);
  int64_t done = 0;
  do {
    const int64_t n = std::min(whole(Link::kWindow, item), data.size - done);
    link.show(data.data + done, n);
    if (link.rank() == root && n) reduce_shown(link, data.data + done, 0, n / item, type, op);
    done += n;
  } while (done < data.size);
}

void all_gather(Link& link, Bytes in, const std::vector<Bytes>& outs) {
  int64_t done = 0;
  do {
    const int64_t n = std::min<int64_t>(Link::kWindow, in.size - done);
    link.show(in.data + done, n);
    for (int r = 0; r < link.size(); ++r)
      if (n) std::memcpy(outs[r].data + done, link.window(r), n);
    done += n;
  } while (done < in.size);
}

void reduce_scatter(
    Link& link, Bytes out, const std::vector<Bytes>& ins, at::ScalarType type, Reduce op) {
  const int64_t item = c10::elementSize(type), ranks = link.size();
  const int64_t most = whole(Link::kWindow / ranks, item);
  std::vector<char> pieces;
  int64_t done = 0;
  do {
    const int64_t n = std::min(most, out.size - done);
    pieces.resize(n * ranks);
    for (int r = 0; r < ranks; ++r)
      if (n) std::memcpy(pieces.data() + r * n, ins[r].data + done, n);
    link.show(pieces.data(), pieces.size());
    const int64_t first = link.rank() * n / item;
    if (n) reduce_shown(link, out.data + done, first, n / item, type, op);
    done += n;
  } while (done < out.size);
}

namespace {

// What each rank will send to each other; refused where the other expects something else.
int64_t agree_on_sizes(
    Link& link, const std::vector<Bytes>& outs, const std::vector<Bytes>& ins) {
  const int ranks = link.size();
  std::vector<int64_t> mine;
  for (auto& one : ins) mine.push_back(one.size);
  for (auto& one : outs) mine.push_back(one.size);
  link.show(mine.data(), mine.size() * sizeof(int64_t));
  int64_t most = 0;
  for (int from = 0; from < ranks; ++from)
    for (int to = 0; to < ranks; ++to) {
      const int64_t sent = reinterpret_cast<const int64_t*>(link.window(from))[to];
      const int64_t expected = reinterpret_cast<const int64_t*>(link.window(to))[ranks + from];
      if (sent != expected)
        throw Mismatch(c10::str(
            "NCCL: in an all_to_all of group '", link.options().group, "' rank ", from, " sends ",
            sent, " bytes where rank ", to, " expects ", expected,
            "; on GPUs this hangs or corrupts memory (emulated)"));
      most = std::max(most, sent);
    }
  return most;
}

}  // namespace

void all_to_all(Link& link, const std::vector<Bytes>& outs, const std::vector<Bytes>& ins) {
  const int ranks = link.size();
  const int64_t share = Link::kWindow / ranks;
  const int64_t most = agree_on_sizes(link, outs, ins);
  std::vector<char> shares(share * ranks);
  for (int64_t done = 0; done < most; done += share) {
    for (int to = 0; to < ranks; ++to) {
      const int64_t n = std::min(share, ins[to].size - done);
      if (n > 0) std::memcpy(shares.data() + to * share, ins[to].data + done, n);
    }
    link.show(shares.data(), shares.size());
    for (int from = 0; from < ranks; ++from) {
      const int64_t n = std::min(share, outs[from].size - done);
      if (n > 0)
        std::memcpy(outs[from].data + done, link.window(from) + link.rank() * share, n);
    }
  }
}

}  // namespace emu
