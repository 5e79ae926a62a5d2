/* kernels.h -- the scenarios of kernels.c. */
#ifndef KERNELS_H
#define KERNELS_H
#include "explorer.h"

extern const struct ex_scenario kernel_message, kernel_pin, kernel_pin_two;

#endif
