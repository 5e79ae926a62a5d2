/* scenarios.h -- all of them; each file says what it is about. */
#ifndef SCENARIOS_H
#define SCENARIOS_H
#include "explorer.h"

extern const struct ex_scenario kernel_message, kernel_pin, kernel_pin_two;
extern const struct ex_scenario ownership, recoverers;

#endif
