# The project's own target helpers. Every folder of src/ is one static library `sb_<folder>`; headers are found by their
# full path from src/ ("core/errors.h").

add_library(sb_options INTERFACE)
target_include_directories(sb_options INTERFACE ${PROJECT_SOURCE_DIR}/src)
target_compile_options(
  sb_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wno-unused-parameter -fno-math-errno>)
# fmt takes nvcc for a compiler without constexpr and then fails to check its format strings.
target_compile_options(sb_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -DFMT_USE_CONSTEXPR=1>)
if(SB_SANITIZE)
  # Of the debug information a report needs the lines alone.
  target_compile_options(sb_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SB_SANITIZE} -O1 -g1
                                              -fno-omit-frame-pointer -fno-sanitize-recover=all>)
  target_link_options(sb_options INTERFACE -fsanitize=${SB_SANITIZE})
endif()

# What of a target runs a few times a step at most need not be optimised as what computes: compiling it costs less.
function(sb_optimize_little target)
  target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
endfunction()

# The sources to compile for SOURCES: with SB_UNITY generated ones that each include up to SB_UNITY_BATCH of them. They
# include by the path from the root of the project, so that they are the same in every checkout, for the compiler cache.
# (CMake's own UNITY_BUILD writes absolute paths.)
set(SB_UNITY_BATCH 16)
function(sb_unity_sources result name)
  if(NOT SB_UNITY)
    set(${result} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  set(unity)
  set(text "")
  set(sources ${ARGN})
  set(included 0)
  foreach(source IN LISTS sources)
    cmake_path(ABSOLUTE_PATH source NORMALIZE)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
    string(APPEND text "#include \"${source}\"\n")
    math(EXPR included "${included} + 1")
    list(LENGTH sources count)
    math(EXPR full "${included} % ${SB_UNITY_BATCH}")
    if(full EQUAL 0 OR included EQUAL count)
      list(LENGTH unity number)
      set(file ${CMAKE_CURRENT_BINARY_DIR}/unity/${name}_${number}.cpp)
      file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
      list(APPEND unity ${file})
      set(text "")
    endif()
  endforeach()
  set(${result} ${unity} PARENT_SCOPE)
endfunction()

# With SB_UNITY what a target needs to compile unity sources.
function(sb_unity_options target)
  if(SB_UNITY)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
    # gcc takes every source that a unity source includes for a header, where what is anonymous would be a mistake.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# sb_library(core SOURCES a.cpp b.cpp LIBS fmt::fmt)
function(sb_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS;PRIVATE_LIBS" ${ARGN})
  sb_unity_sources(sources sb_${name} ${ARG_SOURCES})
  add_library(sb_${name} STATIC ${sources})
  sb_unity_options(sb_${name})
  target_link_libraries(sb_${name} PUBLIC sb_options ${ARG_LIBS} PRIVATE ${ARG_PRIVATE_LIBS})
endfunction()

# Compiles SOURCES once per instruction set (AVX2 and AVX-512) into the library. Inside, SB_ISA is `avx2` or `avx512`, to
# be used as the namespace of everything such a file defines; core/cpu_isa.h says at run time which one to call.
function(sb_isa_sources name)
  foreach(isa avx2 avx512)
    add_library(sb_${name}_${isa} OBJECT ${ARGN})
    target_link_libraries(sb_${name}_${isa} PRIVATE sb_options fmt::fmt)
    target_compile_definitions(sb_${name}_${isa} PRIVATE SB_ISA=${isa} SB_ISA_${isa})
    if(isa STREQUAL avx2)
      target_compile_options(sb_${name}_${isa} PRIVATE -mavx2 -mfma -mf16c)
    else()
      target_compile_options(sb_${name}_${isa} PRIVATE -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
                                                       -mprefer-vector-width=512)
    endif()
    target_sources(sb_${name} PRIVATE $<TARGET_OBJECTS:sb_${name}_${isa}>)
  endforeach()
endfunction()

# What every source of a test is compiled with. Paths are relative to the source tree (tests run there), so that the
# compiler cache serves every checkout.
function(sb_test_options target)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${target} PRIVATE SB_TEST_DATA="tests/data" SB_SOURCE_DIR=".")
endfunction()

# sb_test_fixture(sb_model_fixture SOURCES model_fixture.cpp LIBS sb_model)
# What several tests share, compiled once; references that compute are here, optimised as the program is.
function(sb_test_fixture name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  sb_unity_sources(sources ${name} ${ARG_SOURCES})
  add_library(${name} STATIC ${sources})
  sb_unity_options(${name})
  sb_test_options(${name})
  target_link_libraries(${name} PUBLIC ${ARG_LIBS} GTest::gtest)
endfunction()

# sb_test(core_arena_test LABEL fast TIMEOUT 60 SOURCES arena_test.cpp LIBS sb_core)
# Labels are those of CONTRIBUTING.md; several ranks (multi) take two cores. With SHARDS n it is registered n times, as
# <name>_0 and so on, each with every n-th of its cases. A test whose own sources compute for seconds says COMPUTES: it is
# optimised as the program is.
function(sb_test name)
  cmake_parse_arguments(ARG "COMPUTES" "LABEL;TIMEOUT;SHARDS" "SOURCES;LIBS" ${ARGN})
  if(NOT ARG_LABEL)
    set(ARG_LABEL fast)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(SB_SANITIZE)
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 6")
  endif()
  if(SB_SOFTGPU AND ARG_LABEL MATCHES "gpu|nccl")
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 20")
  endif()
  sb_unity_sources(sources ${name} ${ARG_SOURCES})
  add_executable(${name} ${sources})
  sb_unity_options(${name})
  sb_test_options(${name})
  if(NOT ARG_COMPUTES)
    sb_optimize_little(${name})
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} GTest::gtest_main)
  if(SB_SANITIZE MATCHES address)
    target_compile_definitions(${name} PRIVATE SB_ADDRESS_SANITIZER)
  endif()
  if(NOT ARG_SHARDS)
    add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    set_tests_properties(${name} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT})
    if(ARG_LABEL STREQUAL multi)
      set_tests_properties(${name} PROPERTIES PROCESSORS 2)
    endif()
    return()
  endif()
  math(EXPR last "${ARG_SHARDS} - 1")
  foreach(shard RANGE ${last})
    add_test(NAME ${name}_${shard} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
    set_tests_properties(${name}_${shard} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${ARG_TIMEOUT}
                         ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${shard}")
  endforeach()
endfunction()

# Runs a test once more on the narrower instruction set, as <name>_avx2, among the slow ones.
function(sb_test_on_avx2 name)
  get_test_property(${name} TIMEOUT timeout)
  add_test(NAME ${name}_avx2 COMMAND ${name} ${ARGN} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name}_avx2 PROPERTIES LABELS slow TIMEOUT ${timeout} ENVIRONMENT SB_CPU_ISA=avx2)
endfunction()

# Runs the cases of a test that are named after CUDA once more under the label gpu, as <name>_cuda; without a GPU they say
# so and are skipped. The test itself leaves them out. Nothing without the CUDA build.
function(sb_test_on_cuda name)
  if(NOT SB_CUDA)
    return()
  endif()
  target_compile_definitions(${name} PRIVATE SB_TEST_CUDA)
  add_test(NAME ${name}_cuda COMMAND ${name} --gtest_filter=*cuda*:*Cuda* WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set(timeout 300)
  if(SB_SOFTGPU)
    set(timeout 2400)
  endif()
  set_tests_properties(${name}_cuda PROPERTIES LABELS gpu TIMEOUT ${timeout})
  set_tests_properties(${name} PROPERTIES ENVIRONMENT GTEST_FILTER=-*cuda*:*Cuda*)
endfunction()
