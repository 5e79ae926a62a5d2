/* scenarios.h -- all of them; each file says what it is about. */
#ifndef SCENARIOS_H
#define SCENARIOS_H
#include "explorer.h"

extern const struct ex_scenario kernel_message, kernel_pin, kernel_pin_two;
extern const struct ex_scenario ownership, recoverers;
extern const struct ex_scenario log_lapped, log_crash, insert, insert_crash;
extern const struct ex_scenario pin, pin_after, pin_batch, pin_own, copy, copy_after;

#endif
