#include "report/schedule_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/errors.h"
#include "core/markup.h"

namespace sb {
namespace {

// Fill colours of micro-batches, forward; backward is the same, darker.
constexpr const char* kForward[] = {"#9ecae1", "#fdae6b", "#a1d99b", "#bcbddc",
                                    "#fdd0a2", "#c6dbef", "#fbb4b9", "#d9d9d9"};
constexpr const char* kBackward[] = {"#3182bd", "#e6550d", "#31a354", "#756bb1",
                                     "#d98c3b", "#6baed6", "#c51b8a", "#737373"};
constexpr size_t kGroupColours = std::size(kForward);

// For light and dark pages, in a file of its own as well as inside one.
constexpr const char* kPictureStyle =
    "<style>.sb-back { fill: #ffffff; } .sb-text { fill: #1b1f24; } .sb-line { stroke: #e4e7eb; }"
    " @media (prefers-color-scheme: dark) { .sb-back { fill: #1e2329; } .sb-text { fill: #e6e6e6; }"
    " .sb-line { stroke: #3a414a; } }</style>\n";

// Which group a micro-batch belongs to, and how strong its colour is: pieces of a sequence in shades of one.
struct Shade {
  size_t group = 0;
  double opacity = 1;
};
std::vector<Shade> shades_of(const PlannedRank& rank) {
  constexpr double kFaintest = 0.45;
  std::vector<Shade> shades;
  size_t group = 0;
  for (const int size : group_sizes(rank)) {
    for (int i = 0; i < size; ++i)
      shades.push_back({group, size == 1 ? 1.0 : kFaintest + (1 - kFaintest) * i / (size - 1)});
    ++group;
  }
  return shades;
}

std::string label(const PlannedMicroBatch& micro_batch) {
  if (micro_batch.is_piece())
    return fmt::format("sequence {}, tokens {} to {}", micro_batch.sequences[0], micro_batch.begin, micro_batch.end);
  return fmt::format("{} sequence{}, {} tokens", micro_batch.sequences.size(),
                     micro_batch.sequences.size() == 1 ? "" : "s", micro_batch.tokens);
}

}  // namespace

ScheduleResult schedule_of(const Plan& plan, const CostModel& cost, int rank) {
  const auto& micro_batches = plan.ranks[static_cast<size_t>(rank)].micro_batches;
  PipelineTimes times;
  times.stages = cost.stages();
  times.micro_batches = static_cast<int>(micro_batches.size());
  for (const PlannedMicroBatch& micro_batch : micro_batches) {
    times.forward.insert(times.forward.end(), micro_batch.forward_us.begin(), micro_batch.forward_us.end());
    times.backward.insert(times.backward.end(), micro_batch.backward_us.begin(), micro_batch.backward_us.end());
    if (!cost.layout().comm && !plan.cut()) continue;
    const auto tokens = static_cast<double>(micro_batch.tokens);
    for (int s = 0; s < times.stages; ++s) {
      times.forward_transfer.push_back(cost.transfer(s, tokens));
      times.backward_transfer.push_back(cost.gradient_transfer(s, tokens, cost.linear(tokens), plan.cut()));
    }
  }
  if (cost.layout().comm) cost.add_exposed(times);
  return rank_schedule(plan.ranks[static_cast<size_t>(rank)], times.stages, cost.layout().warmup_depth)
      ->analyze(times, {});
}

std::string schedule_trace(const Plan& plan, const CostModel& cost) {
  using Json = nlohmann::ordered_json;
  Json events = Json::array();
  for (int r = 0; r < static_cast<int>(plan.ranks.size()); ++r) {
    events.push_back({{"name", "process_name"},
                      {"ph", "M"},
                      {"pid", r},
                      {"args", {{"name", fmt::format("data-parallel rank {}", r)}}}});
    for (int s = 0; s < cost.stages(); ++s)
      events.push_back({{"name", "thread_name"},
                        {"ph", "M"},
                        {"pid", r},
                        {"tid", s},
                        {"args", {{"name", fmt::format("stage {}", s)}}}});
    const ScheduleResult schedule = schedule_of(plan, cost, r);
    std::vector<double> end(static_cast<size_t>(cost.stages()), 0.0), took = end;
    for (const ScheduledOperation& op : schedule.operations) {
      const auto& micro_batch = plan.ranks[static_cast<size_t>(r)].micro_batches[static_cast<size_t>(op.position)];
      nlohmann::ordered_json about = {{"tokens", micro_batch.tokens},
                                      {"sequences", micro_batch.sequences},
                                      {"slack_us", op.slack},
                                      {"critical", op.critical}};
      if (micro_batch.is_piece()) about["piece"] = {micro_batch.begin, micro_batch.end};
      events.push_back({{"name", fmt::format("{}{}", op.backward ? "B" : "F", op.position)},
                        {"cat", op.backward ? "backward" : "forward"},
                        {"ph", "X"},
                        {"pid", r},
                        {"tid", op.stage},
                        {"ts", op.start},
                        {"dur", op.end - op.start},
                        {"args", std::move(about)}});
      if (const double gather = cost.gather(op.stage).beside(op.end - op.start);
          !op.backward && op.position == 0 && gather > 0)
        events.push_back({{"name", "gather"},
                          {"cat", "communication"},
                          {"ph", "X"},
                          {"pid", r},
                          {"tid", op.stage},
                          {"ts", 0.0},
                          {"dur", gather}});
      if (op.end <= end[static_cast<size_t>(op.stage)]) continue;
      end[static_cast<size_t>(op.stage)] = op.end;
      took[static_cast<size_t>(op.stage)] = op.end - op.start;
    }
    for (int s = 0; s < cost.stages(); ++s)
      if (const double after = cost.tail(s).beside(took[static_cast<size_t>(s)]); after > 0)
        events.push_back({{"name", "reduction"},
                          {"cat", "communication"},
                          {"ph", "X"},
                          {"pid", r},
                          {"tid", s},
                          {"ts", end[static_cast<size_t>(s)]},
                          {"dur", after}});
  }
  return Json{{"displayTimeUnit", "ms"}, {"traceEvents", events}}.dump() + "\n";
}

namespace {

// Of the drawing, in its own units: the time axis and where it begins, a stage's row, the room after a rank and after a
// panel, a panel's title.
constexpr double kTimeWidth = 1000, kTimeLeft = 110, kRow = 22, kGap = 8, kTitle = 26;

// The slowest, in the order of the ranks.
std::vector<int> slowest_ranks(const Plan& plan, int count) {
  std::vector<int> ranks(plan.ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return plan.ranks[static_cast<size_t>(a)].makespan_us > plan.ranks[static_cast<size_t>(b)].makespan_us;
  });
  ranks.resize(static_cast<size_t>(std::min<int>(count, static_cast<int>(ranks.size()))));
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// `y`: of the rank's first row; `scale`: from microseconds; `decides`: whether what is critical here is framed.
std::string drawn_operation(const ScheduledOperation& op, const PlannedMicroBatch& micro_batch, const Shade& shade,
                            double y, double scale, bool decides) {
  const size_t colour = shade.group % kGroupColours;
  const double x = kTimeLeft + op.start * scale, w = std::max(0.5, (op.end - op.start) * scale);
  std::string svg = fmt::format(
      "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.0f}\" fill=\"{}\" fill-opacity=\"{:.2f}\" "
      "stroke=\"{}\" "
      "stroke-width=\"0.7\"><title>{} of micro-batch {} ({}): {:.2f} ms, slack {:.2f} ms</title></rect>\n",
      x, y + op.stage * kRow, w, kRow - 3, (op.backward ? kBackward : kForward)[colour], shade.opacity,
      decides && op.critical ? "#d00000" : "none", op.backward ? "backward" : "forward", op.position,
      label(micro_batch), (op.end - op.start) / 1e3, op.slack / 1e3);
  if (w > 16)
    svg += fmt::format("<text x=\"{:.2f}\" y=\"{:.2f}\" fill=\"{}\">{}</text>\n", x + 3, y + op.stage * kRow + 14,
                       op.backward ? "white" : "black", op.position);
  return svg;
}

std::string drawn_rank(const Plan& plan, const CostModel& cost, int r, double y, double scale) {
  const PlannedRank& rank = plan.ranks[static_cast<size_t>(r)];
  double slowest = 0;
  for (const PlannedRank& each : plan.ranks) slowest = std::max(slowest, each.makespan_us);
  // A rank that others wait for decides the step; what is critical in the others delays nothing.
  const bool decides = rank.makespan_us >= 0.999 * slowest;
  std::string svg;
  for (int s = 0; s < cost.stages(); ++s)
    svg += fmt::format(
        "<text class=\"sb-text\" x=\"8\" y=\"{:.1f}\">rank {} stage {}</text>\n<line class=\"sb-line\" x1=\"{}\" "
        "x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
        y + s * kRow + 14, r, s, kTimeLeft, kTimeLeft + kTimeWidth, y + (s + 1) * kRow - 1, y + (s + 1) * kRow - 1);
  const std::vector<Shade> shades = shades_of(rank);
  const ScheduleResult schedule = schedule_of(plan, cost, r);
  for (const ScheduledOperation& op : schedule.operations) {
    const auto position = static_cast<size_t>(op.position);
    svg += drawn_operation(op, rank.micro_batches[position], shades[position], y, scale, decides);
  }
  return svg;
}

std::string drawn_title(const SchedulePanel& panel, int max_ranks, double y) {
  const Plan& plan = *panel.plan;
  return fmt::format(
      "<text class=\"sb-text\" x=\"8\" y=\"{:.0f}\" font-size=\"14\" font-weight=\"bold\">{}: {:.1f} ms, bubbles "
      "{:.0f}%{}</text>\n",
      y + 14, markup_text(panel.title), plan.makespan_us / 1e3, 100 * plan.bubble_share,
      std::ssize(plan.ranks) > max_ranks
          ? fmt::format(" (showing the {} slowest of {} replicas)", max_ranks, plan.ranks.size())
          : "");
}

}  // namespace

std::string schedule_svg(const std::vector<SchedulePanel>& panels, const CostModel& cost, int max_ranks) {
  double longest = 0, height = 10;
  for (const SchedulePanel& panel : panels) {
    longest = std::max(longest, panel.plan->makespan_us);
    const int shown = std::min(max_ranks, static_cast<int>(panel.plan->ranks.size()));
    height += kTitle + shown * (cost.stages() * kRow + kGap) + kGap;
  }
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\" "
      "font-size=\"11\">\n{2}<rect class=\"sb-back\" width=\"100%\" height=\"100%\"/>\n",
      kTimeLeft + kTimeWidth + 20, height + 20, kPictureStyle);
  double y = 10;
  for (const SchedulePanel& panel : panels) {
    svg += drawn_title(panel, max_ranks, y);
    y += kTitle;
    for (const int r : slowest_ranks(*panel.plan, max_ranks)) {
      svg += drawn_rank(*panel.plan, cost, r, y, kTimeWidth / longest);
      y += cost.stages() * kRow + kGap;
    }
    y += kGap;
  }
  svg += fmt::format(
      "<text class=\"sb-text\" x=\"{}\" y=\"{:.0f}\">light: forward, dark: backward, shades of one color: pieces of a "
      "sequence, red frame: critical path; full width: {:.1f} ms</text>\n"
      "</svg>\n",
      kTimeLeft, y + 12, longest / 1e3);
  return svg;
}

}  // namespace sb
