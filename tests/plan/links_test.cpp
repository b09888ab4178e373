#include "plan/latency/links.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "plan/latency/links_file.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

// Rates in GB/s.
Links links_of(double inside, double between, int node_ranks, int adapters) {
  Links links;
  links.node_ranks = node_ranks;
  links.adapters = adapters;
  links.transfer_inside = links.reduce_inside = links.gather_inside = {0, 1e-3 / inside};
  links.transfer_between = links.reduce_between = links.gather_between = {0, 1e-3 / between};
  return links;
}

TEST(Links, GroupsOnNodes) {
  const auto expect = [](const LinkGroup& group, int ranks, int nodes, int fewest) {
    EXPECT_EQ(group.ranks, ranks);
    EXPECT_EQ(group.nodes, nodes);
    EXPECT_EQ(group.fewest, fewest);
  };
  expect(group_of_ranks(8, 1, 1, 0, 8), 8, 1, 8);
  expect(group_of_ranks(16, 1, 1, 0, 8), 16, 2, 8);
  expect(group_of_ranks(1, 1, 8, 2, 8), 8, 2, 4);   // ranks 0, 2, … 14
  expect(group_of_ranks(2, 2, 4, 4, 8), 8, 2, 4);   // 0, 2; 4, 6; 8, 10; 12, 14
  expect(group_of_ranks(1, 1, 4, 16, 8), 4, 4, 1);  // a rank of every other node
  expect(group_of_ranks(3, 1, 1, 0, 2), 3, 2, 1);
}

// A node's adapters carry what leaves it, as far as the group has them and its ranks can take it on.
TEST(Links, GroupsThatFillNodesUseAllAdapters) {
  const Links eight = links_of(300, 25, 8, 8);
  const double bytes = 8e6, us = bytes / 1e3;
  EXPECT_NEAR(eight.reduce(bytes, {8, 1, 8}, 8), us * 7 / 8 / 300, 1e-9);
  EXPECT_NEAR(eight.reduce(bytes, {16, 2, 8}, 8), us * 15 / 16 / 200, 1e-9);
  EXPECT_NEAR(eight.reduce(bytes, {2, 2, 1}, 8), us / 2 / 25, 1e-9);
  // Not faster than the node inside.
  EXPECT_NEAR(links_of(150, 25, 8, 8).gather(bytes, {16, 2, 8}, 8), us * 15 / 16 / 150, 1e-9);
  // One adapter for eight ranks in use; for one of them where it is alone.
  const Links single = links_of(300, 25, 8, 1);
  EXPECT_NEAR(single.reduce(bytes, {2, 2, 1}, 8), 8 * us / 2 / 25, 1e-9);
  EXPECT_NEAR(single.reduce(bytes, {2, 2, 1}, 1), us / 2 / 25, 1e-9);
  EXPECT_NEAR(single.between(8)(bytes), 8 * us / 25, 1e-9);
  EXPECT_NEAR(single.between(1)(bytes), us / 25, 1e-9);
  EXPECT_NEAR(eight.between(8)(bytes), us / 25, 1e-9);
}

TEST(Links, SumsInsideTheNodeComeFirstWhereThatIsFaster) {
  Links slow = links_of(300, 12, 8, 1);
  const double us = 8e3;  // of 8 MB at 1 GB/s
  const double ring = us * 15 / 16 / 12, first = us * 7 / 8 / 300 + us / 2 / 12;
  ASSERT_LT(first, ring);
  EXPECT_NEAR(slow.reduce(8e6, {16, 2, 8}, 8), first, 1e-9);
  // Nodes with unequal numbers of ranks have no such way.
  EXPECT_NEAR(slow.reduce(8e6, {9, 2, 1}, 8), us * 8 / 9 / 12 * 8, 1e-9);
  // Measured links are those of the library, whichever way it took.
  slow.measured = true;
  EXPECT_NEAR(slow.reduce(8e6, {16, 2, 8}, 8), ring, 1e-9);
}

MeasuredLinks measured_by(std::vector<std::string> hosts) {
  MeasuredLinks measured;
  measured.date = "2026-11-19T12:00:00Z";
  measured.hosts = std::move(hosts);
  Links links = links_of(10, 2, 2, 1);
  links.reduce_inside.latency_us = 7;
  measured.host = {"MPI", links};
  return measured;
}

TEST(LinksFile, HoldsWhatWasMeasured) {
  const MeasuredLinks measured = measured_by({"a", "a", "b", "b"});
  const MeasuredLinks read = parse_links(write_links(measured), "links.json");
  EXPECT_EQ(read.hosts, measured.hosts);
  EXPECT_FALSE(read.gpu);
  const Links links = links_for(read, false, "links.json");
  EXPECT_TRUE(links.measured);
  EXPECT_EQ(links.node_ranks, 2);
  EXPECT_EQ(links.adapters, 1);
  EXPECT_EQ(links.reduce_inside.latency_us, 7);
  EXPECT_NEAR(links.transfer_between.us_per_byte, 5e-4, 1e-12);
  EXPECT_EQ(links.source, "measured over MPI by 2 + 2 ranks on 2 hosts (a, b) (links.json)");
  EXPECT_NE(message_of([&] { links_for(read, true, "links.json"); }).find("links.json: has no links of GPUs"),
            std::string::npos);
  // On one host nothing is between, and on hosts of one rank nothing inside.
  const Links one = links_for(parse_links(write_links(measured_by({"a", "a"})), "l"), false, "l");
  EXPECT_NEAR(one.transfer_between.us_per_byte, 1e-4, 1e-12);
  const Links apart = links_for(parse_links(write_links(measured_by({"a", "b"})), "l"), false, "l");
  EXPECT_NEAR(apart.transfer_inside.us_per_byte, 5e-4, 1e-12);
}

TEST(LinksFile, OtherHostsOrRanksAreNamed) {
  const MeasuredLinks measured = measured_by({"a", "a", "b", "b"});
  EXPECT_EQ(measured_elsewhere(measured, {"a", "a", "b", "b"}), "");
  EXPECT_EQ(measured_elsewhere(measured, {"a", "a"}),
            "was measured by 2 + 2 ranks on 2 hosts (a, b), but 2 ranks on 1 host (a) train");
  EXPECT_EQ(measured_elsewhere(measured, {"a", "a", "c", "c"}),
            "was measured by 2 + 2 ranks on 2 hosts (a, b), but 2 + 2 ranks on 2 hosts (a, c) train");
}

TEST(LinksFile, WhatCannotBeIsNamed) {
  const Json whole = Json::parse(write_links(measured_by({"a", "a", "b", "b"})));
  const struct {
    const char *path, *value, *said;
  } cases[] = {
      {"/format", "\"other\"", "l.json: is not a file of links"},
      {"/version", "2", "l.json: has version 2, but this program reads version 1"},
      {"/date", "3", "l.json.date: must be a string"},
      {"/hosts", "[]", "l.json.hosts: must be a list with the host of every rank"},
      {"/hosts", "[\"a\", 3]", "l.json.hosts: must be a list of strings"},
      {"/host/over", "null", "l.json.host.over: must be a string"},
      {"/host/adapters_per_node", "0", "l.json.host.adapters_per_node: must be a number from 1"},
      {"/host/reduce_inside/gigabytes_per_second", "0", "l.json.host.reduce_inside.gigabytes_per_second: must be a"},
      {"/host/gather_between/gigabytes_per_second", "-1", "l.json.host.gather_between.gigabytes_per_second: must be"},
      {"/host/transfer_between/latency_us", "-1", "l.json.host.transfer_between.latency_us: must be a number from 0"},
      {"/host/transfer_inside", "7", "l.json.host.transfer_inside: `latency_us` is missing"},
  };
  for (const auto& [path, value, said] : cases) {
    Json changed = whole;
    changed[Json::json_pointer(path)] = Json::parse(value);
    EXPECT_EQ(message_of([&] { parse_links(changed.dump(), "l.json"); }).rfind(said, 0), 0u)
        << path << " = " << value << ": " << message_of([&] { parse_links(changed.dump(), "l.json"); });
  }
  for (const char* missing : {"version", "hosts", "date"}) {
    Json changed = whole;
    changed.erase(missing);
    EXPECT_NE(message_of([&] { parse_links(changed.dump(), "l.json"); }).find("is missing"), std::string::npos);
  }
  for (const char* missing : {"transfer_inside", "gather_between", "over"}) {
    Json changed = whole;
    changed["host"].erase(missing);
    EXPECT_NE(message_of([&] { parse_links(changed.dump(), "l.json"); }).find("is missing"), std::string::npos);
  }
  const std::string text = write_links(measured_by({"a", "b"}));
  for (size_t end = 0; end + 2 < text.size(); end += 11)
    EXPECT_EQ(message_of([&] { parse_links(text.substr(0, end), "l.json"); }).rfind("l.json: is not a file of", 0), 0u);
}

}  // namespace
}  // namespace sb
