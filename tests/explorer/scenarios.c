/* scenarios.c -- the list of all. */
#include <stddef.h>

#include "kernels.h"

const struct ex_scenario *const ex_scenarios[] = {&kernel_message, &kernel_pin, &kernel_pin_two, NULL};
