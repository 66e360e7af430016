#include "dispatch.hpp"

#include <algorithm>
#include <chrono>
#include <optional>

#include "pool.hpp"
#include "sets.hpp"
#include "workspace.hpp"

namespace saccade {

namespace {

// Below some microseconds of work a second thread costs more than it saves. A head costs at least as much as this many
// products, however short it is.
constexpr double FORWARD_HEAD = 3e3, BACKWARD_HEAD = 2e4;
int worth(const Call& c, int threads, double head) {
  const double products = static_cast<double>(c.Tq * c.Tk) * static_cast<double>(c.D + c.Dv) + head;
  return static_cast<double>(c.B * c.Hq) * products < 1.5e5 ? 1 : threads;
}

// the most bytes of the sums of key gradients, unless one head needs more
constexpr int64_t MOST_SUMS = int64_t{1} << 28;

int64_t number_size(const Call& c) { return c.q.dtype == DType::f64 ? 8 : 4; }

// memory for lse, which kernels always write, if the caller does not need it
std::optional<Workspace> lse_nobody_wants(Call& c) {
  std::optional<Workspace> space;
  c.lse_unread = !c.lse;
  if (!c.lse) c.lse = space.emplace(c.B * c.Tq * c.Hq * number_size(c)).get();
  return space;
}

}  // namespace

void run_forward(Call& c, const std::vector<const Part*>& parts, int threads) {
  const Kernels& k = matrix_kernels_of(c);
  const std::optional<Workspace> own_lse = lse_nobody_wants(c);
  c.threads = threads = worth(c, threads, FORWARD_HEAD);
  // what a part passes on to the next: the maximum of each row's scores and the sum of its weights
  std::optional<Workspace> sums;
  c.rows = parts.size() > 1 ? static_cast<double*>(sums.emplace(c.B * c.Tq * c.Hq * 16).get()) : nullptr;
  for (size_t n = 0; n < parts.size(); ++n) {
    c.part = parts[n];
    c.merge = n > 0;
    c.last = n + 1 == parts.size();
    const int64_t bytes = k.forward_scratch(c);
    parallel(k.forward_tasks(c), threads, [&](int64_t task) { k.forward(c, task, scratch(bytes)); });
  }
}

// partial results of ranges of keys, then their sums; false where some rows of ordered decode need the forward
static bool decode_ranges(Call& c, int threads) {
  const Kernels& k = decode_kernels_of(c);
  c.threads = threads = worth(c, threads, FORWARD_HEAD);
  c.n_chunks = std::max<int64_t>(1, (c.Tk + c.split_keys - 1) / c.split_keys);
  const Workspace partial(c.B * c.Hk * c.n_chunks * c.G * c.Tq * c.partial_width() * number_size(c));
  std::vector<uint8_t> lost(c.range ? static_cast<size_t>(c.B * c.Hk) : 0);
  c.lost = lost.data();
  c.partial = partial.get();
  const int64_t bytes = k.decode_scratch(c);
  parallel(k.decode_tasks(c), threads, [&](int64_t task) { k.decode(c, task, scratch(bytes)); });
  if (c.n_chunks > 1) parallel(c.B * c.Hk, threads, [&](int64_t task) { k.combine(c, task); });
  return std::find(lost.begin(), lost.end(), 1) == lost.end();
}

void run_decode(Call& c, const Part& part, int threads) {
  c.part = &part;
  if (matrix_kernels_of(c).short_rows(c)) return run_forward(c, {&part}, threads);
  const std::optional<Workspace> own_lse = lse_nobody_wants(c);
  if (!decode_ranges(c, threads)) run_forward(c, {&part}, threads);
}

static bool any_far(const Call& c, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row)
    if (c.far(row)) return true;
  return false;
}

// the stages of a backward; several parts add to the same sums, so they have one stage
static std::vector<Stage> stages_of(const Call& c, const std::vector<const Part*>& parts) {
  const Part& p = *parts[0];
  if (parts.size() > 1 || !p.n_stages) return {{0, INT64_MAX, 0, c.Tk, c.Tk}};
  std::vector<Stage> stages;
  for (const int32_t *x = p.stages, *end = x + 3 * p.n_stages; x < end; x += 3) {
    if (!stages.empty()) stages.back().tile_end = x[0], stages.back().ready = x[1];
    stages.push_back({x[0], INT64_MAX, x[1], x[2], c.Tk});
  }
  return stages;
}

void run_backward(Call& c, const std::vector<const Part*>& parts, int threads) {
  const Kernels& k = matrix_kernels_of(c);
  c.last = parts.size() == 1;
  c.threads = threads = worth(c, threads, BACKWARD_HEAD);
  const std::vector<Stage> stages = stages_of(c, parts);
  c.sum_keys = 0;
  for (const Stage& x : stages) c.sum_keys = std::max(c.sum_keys, x.key_end - x.key);
  // a plan limits the memory of the sums by the number of owners; where that is fixed, fewer heads are computed at once
  const int64_t heads = c.B * c.Hk, each = c.splits * k.backward_sums(c) * number_size(c);
  const int64_t at_once = c.range ? std::min(heads, 1 + MOST_SUMS / std::max<int64_t>(1, each)) : heads;
  const Workspace sums(at_once * each);
  c.partial = sums.get();
  const int64_t bytes = k.backward_scratch(c), rows = c.B * c.Tq * c.Hq;
  std::optional<Workspace> own_rows, refined;
  if (!c.rows) c.rows = static_cast<double*>(own_rows.emplace(rows * 16).get());
  const auto refine_rows = [&] {
    c.sums = static_cast<double*>(refined.emplace(rows * 24).get());
    c.lse_lost = c.sums + 2 * rows;
  };
  if (!c.delta && (c.refines_all() || c.range)) refine_rows();
  const auto each_row = [&](auto f) {
    constexpr int64_t block = 256;
    parallel((rows + block - 1) / block, threads, [&](int64_t task) {
      for (int64_t row = task * block; row < std::min(rows, (task + 1) * block); ++row) f(row);
    });
  };
  const auto gradients = [&] {
    const int64_t n = std::min(at_once, heads - c.first), first = c.first * c.splits;
    parallel(n * c.splits, threads, [&](int64_t task) { k.backward(c, first + task, scratch(bytes)); });
  };
  each_row([&](int64_t row) { k.row(c, row); });
  if (!c.sums && !c.delta && any_far(c, rows)) {
    refine_rows();
    each_row([&](int64_t row) { k.row(c, row); });
  }
  if (c.sums && parts.size() > 1) {
    c.only_sums = 1;
    c.stage = stages[0];
    for (const Part* part : parts) c.part = part, gradients();
    each_row([&](int64_t row) {
      if (c.refines(row)) k.refine(c, row);
    });
    c.only_sums = 0, c.sums = nullptr;
  }
  for (; c.first < heads; c.first += at_once) {
    c.before = {};
    for (const Stage& stage : stages) {
      c.stage = stage;
      for (size_t n = 0; n < parts.size(); ++n) c.part = parts[n], c.accumulate = n > 0, gradients();
      constexpr int64_t block = 1024;
      const int64_t n = std::min(at_once, heads - c.first), begin = c.before.ready;
      parallel(n * ((stage.ready - begin + block - 1) / block), threads, [&](int64_t task) {
        const int64_t from = begin + task / n * block;
        k.backward_finish(c, c.first + task % n, from, std::min(from + block, stage.ready));
      });
      c.before = stage;
    }
  }
  for (const Part* part : parts) {
    c.part = part;
    if (c.dbias.data) {
      const int64_t tasks = (c.bias_b ? c.B : 1) * (c.bias_h ? c.Hq : 1) * (c.bias_t ? c.part->n_tiles : 1);
      parallel(tasks, threads, [&](int64_t task) { k.backward_bias(c, task, scratch(bytes)); });
    }
    if (c.ddistances.data) {
      const int64_t tasks = (c.ddistances.stride[0] ? c.B : 1) * c.Hq;
      parallel(tasks, threads, [&](int64_t task) { k.backward_distances(c, task, scratch(bytes)); });
    }
  }
}

void run_tangent(Call& c, Call& d, const std::vector<const Part*>& parts, int threads) {
  const Kernels& k = kernels_of(c);
  c.tangent = &d;
  c.threads = threads = worth(c, threads, FORWARD_HEAD);
  // what a part passes on to the next: sums of each row, and its values by their weights
  const int64_t rows = parts.size() > 1 ? c.B * c.Tq * c.Hq : 0;
  const Workspace sums(rows * 24), values(rows * c.Dv * number_size(c));
  c.rows = static_cast<double*>(sums.get());
  const DType dtype = c.q.dtype == DType::f64 ? DType::f64 : DType::f32;
  d.do_ = {static_cast<char*>(values.get()), {c.Tq * c.Hq * c.Dv, c.Hq * c.Dv, c.Dv, 1}, dtype};
  for (size_t n = 0; n < parts.size(); ++n) {
    c.part = parts[n];
    c.merge = n > 0;
    c.last = n + 1 == parts.size();
    const int64_t bytes = k.tangent_scratch(c);
    parallel(k.tangent_tasks(c), threads, [&](int64_t task) { k.tangent(c, task, scratch(bytes)); });
  }
}

void run_append(const Append& c, int threads) {
  const Kernels& k = *current_set().kernels;
  const int64_t bytes = k.append_scratch(c), block = 16;
  parallel((c.tokens + block - 1) / block, threads, [&](int64_t task) {
    for (int64_t i = task * block; i < std::min(c.tokens, (task + 1) * block); ++i) k.append(c, i, scratch(bytes));
  });
}

namespace {
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
}  // namespace

double probe_flops(int dtype, int threads) {
  const Set& set = current_set();
  const bool pairs = set.pairs && dtype == static_cast<int>(DType::bf16), matrix = pairs && set.matrix;
  const Kernels& k = pairs ? *set.pairs : *set.kernels;
  constexpr int64_t rounds = 2000;
  double best = 0;
  for (int n = 0; n < 5; ++n) {
    const double begin = now();
    parallel(threads, threads, [&](int64_t) { k.probe(dtype, matrix, rounds, scratch(1 << 18)); });
    best = std::max(best, static_cast<double>(threads * rounds * k.probe_flops()) / (now() - begin));
  }
  return best;
}

double probe_stream(char* data, int64_t bytes, int threads) {
  double best = 0;
  const int64_t words = bytes / 8, blocks = 64, each = words / blocks;
  std::vector<uint64_t> sums(static_cast<size_t>(blocks));
  for (int n = 0; n < 5; ++n) {
    const double begin = now();
    parallel(blocks, threads, [&](int64_t task) {
      const uint64_t* p = reinterpret_cast<const uint64_t*>(data) + task * each;
      uint64_t s[8] = {};
      for (int64_t i = 0; i + 8 <= each; i += 8)
        for (int l = 0; l < 8; ++l) s[l] += p[i + l];
      sums[static_cast<size_t>(task)] = s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
    });
    best = std::max(best, static_cast<double>(each * blocks * 8) / (now() - begin));
  }
  volatile uint64_t keep = sums[0];
  (void)keep;
  return best;
}

}  // namespace saccade
