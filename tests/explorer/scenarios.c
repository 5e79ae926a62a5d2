/* scenarios.c -- the list of all. */
#include "scenarios.h"

#include <stddef.h>

const struct ex_scenario *const ex_scenarios[] = {
    &kernel_message, &kernel_pin, &kernel_pin_two,
    &ownership, &recoverers,
    NULL,
};
