// The tests, each a function that returns if all is well. main.cpp lists them.
#pragma once

#include <memory>
#include <string>

#include "m2n/transport.h"

namespace antiphon::m2n::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif

extern std::string provider;  // under test, set by main
std::shared_ptr<Transport> make();

// pair_tests.cpp
void payload_sizes();
void both_directions();
void eight_pairs();
void many_messages();
void late_writer();
void reconnect();
void deadline_and_interrupt();
void blocked_waits();
void payload_in_place();
void keeper_rests();
void opening_beside_a_polling_owner();
void departed_before_the_connection_stands();

// refusal_tests.cpp
void refusals();
void mangled_bytes();
void choices();
void information();

// process_tests.cpp
void two_processes();
void two_processes_both_directions();
void killed_sender();
void killed_receiver();
int run_as_child(const std::string& mode);  // the other process of these; returns its exit status

}  // namespace antiphon::m2n::test
