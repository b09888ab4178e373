#include "plan/latency/links_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <set>

#include "core/errors.h"
#include "core/files/regular_file.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;
constexpr double kMostLatency = 1e9, kLeastRate = 1e-6, kMostRate = 1e6;  // microseconds, GB/s
constexpr size_t kMostRanks = 1 << 20;

struct NamedLink {
  const char* name;
  Link Links::*link;
};
constexpr NamedLink kInside[] = {{"transfer_inside", &Links::transfer_inside},
                                 {"reduce_inside", &Links::reduce_inside},
                                 {"gather_inside", &Links::gather_inside}},
                    kBetween[] = {{"transfer_between", &Links::transfer_between},
                                  {"reduce_between", &Links::reduce_between},
                                  {"gather_between", &Links::gather_between}};

const Json& value_of(const Json& json, const char* key, const std::string& where) {
  SB_USER_CHECK(json.is_object() && json.contains(key),
                "{}: `{}` is missing; run `sparsebalance profile --links` again", where, key);
  return json[key];
}

double number(const Json& json, const char* key, const std::string& where, double least, double most) {
  const Json& value = value_of(json, key, where);
  SB_USER_CHECK(value.is_number() && value.get<double>() >= least && value.get<double>() <= most,
                "{}.{}: must be a number from {:g} to {:g}", where, key, least, most);
  return value.get<double>();
}

std::string text_of(const Json& json, const char* key, const std::string& where) {
  const Json& value = value_of(json, key, where);
  SB_USER_CHECK(value.is_string(), "{}.{}: must be a string", where, key);
  return value.get<std::string>();
}

Link read_link(const Json& json, const std::string& where) {
  return {number(json, "latency_us", where, 0, kMostLatency),
          1e-3 / number(json, "gigabytes_per_second", where, kLeastRate, kMostRate)};
}

int most_in_a_node(const std::vector<std::string>& hosts) {
  const std::multiset<std::string> all(hosts.begin(), hosts.end());
  size_t most = 0;
  for (const std::string& host : hosts) most = std::max(most, all.count(host));
  return static_cast<int>(most);
}

int different(const std::vector<std::string>& hosts) {
  return static_cast<int>(std::set<std::string>(hosts.begin(), hosts.end()).size());
}

MeasuredLinks::Way read_way(const Json& json, const std::vector<std::string>& hosts, const std::string& where) {
  MeasuredLinks::Way way;
  way.over = text_of(json, "over", where);
  Links& links = way.links;
  links.measured = true;
  links.node_ranks = most_in_a_node(hosts);
  links.adapters = static_cast<int>(number(json, "adapters_per_node", where, 1, kMostRanks));
  const auto read = [&](const NamedLink& one) {
    links.*one.link = read_link(value_of(json, one.name, where), where + "." + one.name);
  };
  const bool inside = links.node_ranks > 1, between = different(hosts) > 1;
  for (const NamedLink& one : kInside)
    if (inside) read(one);
  for (const NamedLink& one : kBetween)
    if (between) read(one);
  // Where no two ranks were on one node, or all on one, the others stand for what nobody measured.
  for (size_t i = 0; i < std::size(kInside); ++i) {
    if (!inside) links.*kInside[i].link = links.*kBetween[i].link;
    if (!between) links.*kBetween[i].link = links.*kInside[i].link;
  }
  return way;
}

Json way_json(const MeasuredLinks::Way& way, const std::vector<std::string>& hosts) {
  Json json = {{"over", way.over}, {"adapters_per_node", way.links.adapters}};
  const auto write = [&](const NamedLink& one) {
    const Link& link = way.links.*one.link;
    json[one.name] = {{"latency_us", link.latency_us}, {"gigabytes_per_second", 1e-3 / link.us_per_byte}};
  };
  if (most_in_a_node(hosts) > 1)
    for (const NamedLink& one : kInside) write(one);
  if (different(hosts) > 1)
    for (const NamedLink& one : kBetween) write(one);
  return json;
}

// "2 + 2 ranks on 2 hosts"
std::string division(const std::vector<std::string>& hosts) {
  std::vector<std::string> names;
  std::vector<int> counts;
  for (const std::string& host : hosts) {
    const auto found = std::find(names.begin(), names.end(), host);
    if (found == names.end()) {
      names.push_back(host);
      counts.push_back(1);
    } else {
      ++counts[static_cast<size_t>(found - names.begin())];
    }
  }
  if (counts.size() > 8) return fmt::format("{} ranks on {} hosts", hosts.size(), counts.size());
  return fmt::format("{} ranks on {} host{} ({})", fmt::join(counts, " + "), counts.size(),
                     counts.size() == 1 ? "" : "s", fmt::join(names, ", "));
}

}  // namespace

std::string write_links(const MeasuredLinks& measured) {
  Json json = {{"format", "sparsebalance-links"},
               {"version", MeasuredLinks::kVersion},
               {"date", measured.date},
               {"hosts", measured.hosts}};
  if (measured.host) json["host"] = way_json(*measured.host, measured.hosts);
  if (measured.gpu) json["gpu"] = way_json(*measured.gpu, measured.hosts);
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

MeasuredLinks parse_links(const std::string& text, const std::string& where) {
  const Json json = Json::parse(text, nullptr, false);
  SB_USER_CHECK(
      json.is_object() && json.contains("format") && json["format"] == "sparsebalance-links",
      "{}: is not a file of links (`format` must be \"sparsebalance-links\"); `sparsebalance profile --links` "
      "writes one",
      where);
  const double version = number(json, "version", where, 1, 1e9);
  SB_USER_CHECK(version == MeasuredLinks::kVersion,
                "{}: has version {}, but this program reads version {}; run `sparsebalance profile --links` again",
                where, version, MeasuredLinks::kVersion);
  MeasuredLinks measured;
  measured.date = text_of(json, "date", where);
  const Json& hosts = value_of(json, "hosts", where);
  SB_USER_CHECK(hosts.is_array() && hosts.size() >= 2 && hosts.size() <= kMostRanks,
                "{}.hosts: must be a list with the host of every rank, two or more", where);
  for (const Json& host : hosts) {
    SB_USER_CHECK(host.is_string(), "{}.hosts: must be a list of strings", where);
    measured.hosts.push_back(host.get<std::string>());
  }
  if (json.contains("host")) measured.host = read_way(json["host"], measured.hosts, where + ".host");
  if (json.contains("gpu")) measured.gpu = read_way(json["gpu"], measured.hosts, where + ".gpu");
  return measured;
}

MeasuredLinks read_links_file(const std::string& path) {
  return parse_links(read_regular_file(path), path);
}

Links links_for(const MeasuredLinks& measured, bool gpu, const std::string& path) {
  const auto& way = gpu ? measured.gpu : measured.host;
  SB_USER_CHECK(way, "{}: has no links of {}; measure them with `sparsebalance profile --links FILE --device {}`", path,
                gpu ? "GPUs" : "processors", gpu ? "cuda" : "cpu");
  Links links = way->links;
  links.source = fmt::format("measured over {} by {} ({})", way->over, division(measured.hosts), path);
  return links;
}

std::string measured_elsewhere(const MeasuredLinks& measured, const std::vector<std::string>& hosts) {
  if (measured.hosts == hosts) return {};
  return fmt::format("was measured by {}, but {} train", division(measured.hosts), division(hosts));
}

}  // namespace sb
